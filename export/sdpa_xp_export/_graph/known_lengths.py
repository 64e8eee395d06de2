"""The lengths that a graph knows: where to read each of them, or how to compute it from others."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from ..spec import SymbolicShape
from .length_names import LengthNames
from .lengths import length_error, plain
from .terms import Terms, added, factors, parts


@dataclass(slots=True)
class KnownLengths(LengthNames):
    """The names of the lengths of a graph, and a value of the graph that has each of them."""

    sources: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """A value that has a length, and the axis, by the name of the length."""

    def learnt(self, value: Any) -> SymbolicShape:
        """Return the shape of a value in the names of the graph; a length that nothing says is read from it."""
        dims = tuple(self.axis(n) if isinstance(n, str) else n for n in map(plain, value.dims))
        for axis, length in enumerate(dims):
            if not self.knows(length):
                self.sources[str(length)] = value, axis
        return dims

    def knows(self, length: int | str) -> bool:
        """Return whether a length is a number, or can be read or computed."""
        if isinstance(length, int) or length in self.sources:
            return True
        if length in self.computed:
            return self.computed[length][0] != "like"
        names = {name for product in self.terms(length) for name in product}
        return length not in names and all(map(self.knows, names))

    def read(self, graph: Any, length: int | str) -> Any:
        """Return a length as a value of the graph, (1,)."""
        if isinstance(length, int):
            return graph.constant([length], "int64")
        if length in self.sources:
            value, axis = self.sources[length]
            return graph.add("Shape", value, dtype="int64", shape=(1,), start=axis, end=axis + 1)
        if length in self.computed:
            function, operand, number = self.computed[length]
            return getattr(graph.namespace, function)(self.read(graph, operand), number, exact=False)
        terms = self.terms(length)
        if not self.knows(length):  # L, beside inputs of the lengths P + L and P
            for known in self.sources:
                rest = added(self.terms(known), terms, -1)
                if all(self.knows(name) for names in rest for name in names):
                    return self.read(graph, known) - self.read(graph, self.name_of(rest))
            raise length_error(graph.function, {"length": length})
        plus, minus = parts(terms)
        total = self._sum(graph, plus or {(): 0})
        return total - self._sum(graph, minus) if minus else total

    def _sum(self, graph: Any, terms: Terms) -> Any:
        products = [[self.read(graph, name) for name in term] for term in factors(terms)]
        return reduce(operator.add, [reduce(operator.mul, product) for product in products])
