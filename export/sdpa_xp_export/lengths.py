"""A length that is known only when the graph runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from sdpa_xp.checks import message
from sdpa_xp_export.spec import Shape

if TYPE_CHECKING:
    from sdpa_xp_export.graph import Graph


class Length(str):
    """The name of a length. It is compared, and stands in shapes; it is no number to compute with."""

    graph: Graph

    @classmethod
    def of(cls, graph: Graph, shape: Shape) -> tuple[int | Length, ...]:
        """A shape whose names know the graph that has them."""
        return tuple(each if isinstance(each, int) else cls._named(graph, each) for each in shape)

    @classmethod
    def _named(cls, graph: Graph, name: str) -> Length:
        made = cls(name)
        made.graph = graph
        return made

    def _refuse(self, *_: object) -> NoReturn:
        rule = "a length that is known only when the graph runs is no number in Python"
        hint = "`reshape` takes -1, `arange` and `asarray` take the length and make values of it."
        raise TypeError(message(self.graph.function, rule, {"length": str(self)}, hint))

    __index__: Any = _refuse
    __int__: Any = _refuse
    __float__: Any = _refuse
    __add__: Any = _refuse
    __radd__: Any = _refuse
    __sub__: Any = _refuse
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
