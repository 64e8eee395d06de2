"""The graph of a layer while it is traced: arrays that meet its values become initializers."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

import array_api_compat
import onnx

from sdpa_xp.errors import ArgumentTypeError

from .._dtypes.dtype import to_numpy
from ..spec import SymbolicShape
from .graph import Attend, Graph, GraphValue
from .lengths import Length, length_error, plain
from .terms import Terms, added, factors, parts

_MOVING = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Expand")
"""Operators that change no integer but its dtype."""
_NODE_NAME = re.compile(r"(constant|[A-Z]\w*)_\d+")


@dataclass(slots=True, kw_only=True)
class TracedGraph(Graph):
    """A graph that knows where to read each named length, and the initializer of each array of the caller."""

    function: str = "to_onnx"
    mixes_kinds: bool = False
    array_names: dict[int, str] = field(default_factory=dict)
    """The name that the initializer of an array gets, by the identity of the array."""
    initializers: dict[int, tuple[Any, GraphValue]] = field(default_factory=dict)
    """Each array that met a value, which keeps it alive, and its initializer, by identity."""
    length_sources: dict[str, tuple[GraphValue, int]] = field(default_factory=dict)
    """A value that has a length, and the axis, by the name of the length."""
    concatenated: dict[str, tuple[int, GraphValue, GraphValue]] = field(default_factory=dict)
    """The axis and the two parts of a value that joins two others, by its name. A cache is such a value."""
    equal_values: dict[str, GraphValue] = field(default_factory=dict)
    """Another value with the same numbers, which an attention node returns anyway, by the name of a value."""

    def input(self, name: str, dtype: str, shape: SymbolicShape) -> GraphValue:
        """Add an input."""
        self.named[name] = Graph.input(self, name, dtype, shape)
        return self.named[name]

    @property
    def used_names(self) -> set[str]:
        """The names of all values, inputs and constants."""
        edges = {name for node in self.nodes for name in node.output}
        return edges | self.named.keys() | {constant.name for constant in self.constants.values()}

    def free_name(self, name: str) -> str:
        """Return `name`, with a number if it is taken, and never a name that a node or a constant may get."""
        used, name = self.used_names, f"{name}_" if _NODE_NAME.fullmatch(name) else name
        candidates = (f"{name}_{n}" if n else name for n in itertools.count())
        return next(candidate for candidate in candidates if candidate not in used)

    def dims_of(self, value: GraphValue) -> SymbolicShape:
        """Return the shape of a value in the names of the graph; a length that nothing says is read from it."""
        dims = tuple(self.lengths.axis(n) if isinstance(n, str) else n for n in map(plain, value.dims))
        for axis, length in enumerate(dims):
            if not self.knows(length):
                self.length_sources[str(length)] = value, axis
        return dims

    def knows(self, length: int | str) -> bool:
        """Return whether a length is a number, or can be read or computed."""
        if isinstance(length, int) or length in self.length_sources:
            return True
        if length in self.lengths.computed:
            return self.lengths.computed[length][0] != "like"
        names = {name for product in self.lengths.terms(length) for name in product}
        return length not in names and all(map(self.knows, names))

    def length(self, length: int | str) -> GraphValue:
        """Return a length, (1,)."""
        if isinstance(length, int):
            return self.constant([length], "int64")
        if length in self.length_sources:
            value, axis = self.length_sources[length]
            return self.add("Shape", value, dtype="int64", shape=(1,), start=axis, end=axis + 1)
        if length in self.lengths.computed:
            function, operand, number = self.lengths.computed[length]
            compute = getattr(self.namespace, function)
            return cast(GraphValue, compute(self.length(operand), number, exact=False))
        terms = self.lengths.terms(length)
        if not self.knows(length):  # L, beside inputs of the lengths P + L and P
            for known in self.length_sources:
                rest = added(self.lengths.terms(known), terms, -1)
                if all(self.knows(name) for names in rest for name in names):
                    return self.length(known) - self.length(self.lengths.name_of(rest))
            raise length_error(self.function, {"length": length})
        plus, minus = parts(terms)
        total = self._sum(plus or {(): 0})
        return total - self._sum(minus) if minus else total

    def _sum(self, terms: Terms) -> GraphValue:
        return reduce(operator.add, [reduce(operator.mul, map(self.length, term)) for term in factors(terms)])

    def from_array(self, array: object) -> GraphValue:
        """Convert an array of any library to an initializer, one for each array, and a length to a number."""
        if isinstance(array, Length):
            axes = self.constant([0], "int64")
            return self.add("Squeeze", self.length(plain(array)), axes, dtype="int64", shape=())
        if not array_api_compat.is_array_api_obj(array):
            rule = "values of a graph must be computed with arrays and numbers"
            raise ArgumentTypeError(self.function, rule, {"operand": type(array).__name__})
        # By identity, as arrays have no hash. The entry keeps the array alive, so no other one gets its number.
        if id(array) not in self.initializers:
            name = self.free_name(self.array_names.get(id(array)) or f"weight_{len(self.weights)}")
            initializer = self.weight(name, to_numpy(self.function, name, array))
            self.initializers[id(array)] = array, initializer
        return self.initializers[id(array)][1]

    def array_of(self, value: object) -> object:
        """Return the array that an initializer was converted from, None for other values, else `value`."""
        if not isinstance(value, GraphValue):
            return value
        return next((array for array, known in self.initializers.values() if known.name == value.name), None)

    def call_graph(self, named: dict[str, GraphValue], float_dtype: str, attend: Attend) -> Graph:
        """Return this graph as the graph of one call of attention, whose inputs are values of this graph."""
        lists = ("inputs", "nodes", "written", "constants", "weights")  # the call writes its nodes here
        shared = {name: getattr(self, name) for name in lists}
        return self.part(attend=attend, float_dtype=float_dtype, named=named, **shared)


def moved_inputs(nodes: Iterable[onnx.NodeProto], inputs: Iterable[str]) -> dict[str, str]:
    """Return the input that each value has its numbers from; computed values have none.

    Reshape(Cast(lengths)) has its numbers from lengths.
    """
    sources = {name: name for name in inputs}
    for node in nodes:
        if node.op_type in _MOVING and node.input[0] in sources:
            sources[node.output[0]] = sources[node.input[0]]
    return sources
