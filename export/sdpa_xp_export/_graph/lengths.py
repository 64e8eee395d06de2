"""A length that is known only when the graph runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from sdpa_xp._checks import message
from sdpa_xp_export._call.length_sums import addends
from sdpa_xp_export.spec import SymbolicShape

HINT = (
    "Lengths add up, and `reshape` takes -1. Write xp = x.__array_namespace__(), then xp.arange(x.shape[1]), "
    "xp.zeros(x.shape), or xp.asarray(x.shape[1]) for its value."
)


class LengthOwner(Protocol):
    """The graph of a length, of which a length itself asks only the name for messages."""

    @property
    def function(self) -> str: ...


class Length(str):
    """The name of a length, or a sum of names. It stands in shapes and can be compared, but it is not a number.

    `past + new` is the length of both, and `past + new - new` is `past` again. A cache needs no more to say
    where its tokens stand.
    """

    graph: LengthOwner

    @classmethod
    def in_shape(cls, graph: LengthOwner, shape: SymbolicShape) -> tuple[int | Length, ...]:
        """Return a shape whose names know their graph."""
        return tuple(length if isinstance(length, int) else cls._named(graph, length) for length in shape)

    @classmethod
    def _named(cls, graph: LengthOwner, name: str) -> Length:
        length = cls(name)
        length.graph = graph
        return length

    def _sum(self, parts: list[str]) -> int | Length:
        if all(part.isdecimal() for part in parts):
            return sum(map(int, parts))
        return self._named(self.graph, "+".join(parts))

    def __add__(self, other: object) -> Any:
        return self._sum([*addends(self), *self._parts(other)])

    def __radd__(self, other: object) -> Any:
        return self._sum([*self._parts(other), *addends(self)])

    def __sub__(self, other: object) -> Any:
        left = addends(self)
        for part in self._parts(other):
            if part not in left:
                self._refuse()
            left.remove(part)
        return self._sum(left)

    def _parts(self, other: object) -> list[str]:
        """Return the names and numbers that a length or a number is the sum of; 0 has none."""
        if isinstance(other, Length):
            return addends(other)
        if isinstance(other, bool) or not isinstance(other, int) or other < 0:
            self._refuse()
        return [str(other)] if other else []

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise length_error(self.graph.function, {"length": str(self)})

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **keywords: Any) -> Any:
        """Compare a length with numbers of NumPy, and refuse every other function of them."""
        if ufunc not in (np.equal, np.not_equal):
            self._refuse()
        plain = (str(operand) if isinstance(operand, Length) else operand for operand in inputs)
        return getattr(ufunc, method)(*plain, **keywords)

    __array_function__: Any = _refuse

    __lt__: Any = _refuse
    __le__: Any = _refuse
    __gt__: Any = _refuse
    __ge__: Any = _refuse
    __index__: Any = _refuse
    __int__: Any = _refuse
    __float__: Any = _refuse
    __rsub__: Any = _refuse
    __mul__: Any = _refuse
    __rmul__: Any = _refuse
    __mod__: Any = _refuse
    __rmod__: Any = _refuse
    __floordiv__: Any = _refuse
    __rfloordiv__: Any = _refuse
    __truediv__: Any = _refuse
    __rtruediv__: Any = _refuse
    __pow__: Any = _refuse
    __rpow__: Any = _refuse
    __neg__: Any = _refuse


def length_error(function: str, got: Mapping[str, object]) -> TypeError:
    """Return the error for a length that is used as a number, in Python or in NumPy."""
    rule = "a length that is known only when the graph runs cannot be used as a Python number"
    return TypeError(message(function, rule, got, HINT))


def has_names(shape: Sequence[Any]) -> bool:
    """Return whether one of the lengths is known only when the graph runs."""
    return any(isinstance(length, str) for length in shape)


def joined_name(*parts: object) -> str:
    """Return a name for a new length, made of what it follows from; equal parts give equal names."""
    return "_".join(str(part).replace("+", "_and_").replace("-", "minus_") for part in parts)
