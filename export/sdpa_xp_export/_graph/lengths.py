"""A length that is known only when the graph runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from sdpa_xp._checks import message
from sdpa_xp_export.spec import SymbolicShape, addends


class LengthOwner(Protocol):
    """The graph of a length, of which a length itself asks only the name for messages."""

    @property
    def function(self) -> str: ...


class Length(str):
    """The name of a length, or a sum of names. It stands in shapes and can be compared; it is no number.

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

    def _refuse(self, *_: object) -> NoReturn:
        rule = "a length that is known only when the graph runs is no number in Python"
        hint = "Lengths add up; `reshape` takes -1, `arange` and `asarray` take a length and make values of it."
        raise TypeError(message(self.graph.function, rule, {"length": str(self)}, hint))

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


def has_names(shape: Sequence[Any]) -> bool:
    """Return whether one of the lengths is known only when the graph runs."""
    return any(isinstance(length, str) for length in shape)


def joined_name(*parts: object) -> str:
    """Return a name for a new length, made of what it follows from; equal parts give equal names."""
    return "_".join(str(part).replace("+", "_and_").replace("-", "minus_") for part in parts)
