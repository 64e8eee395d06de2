"""Axes that a caller names, counted from the front."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export._graph.graph import GraphValue

Axes = int | Sequence[int] | None


def axis_of(value: GraphValue, axis: int, added: int = 0) -> int:
    """Count `axis` from the front, for a value that gets `added` more axes."""
    count, number = value.ndim + added, operator.index(axis)
    if not -count <= number < count:
        rule = f"`axis` must be one of {count} axes"
        raise ArgumentValueError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
    return number % count


def axes_of(value: GraphValue, axes: Axes) -> tuple[int, ...]:
    """Count several axes from the front; None means all of them."""
    if axes is None:
        return tuple(range(value.ndim))
    counted = tuple(axis_of(value, axis) for axis in (axes if isinstance(axes, Sequence) else (axes,)))
    if len({*counted}) < len(counted):
        rule = "`axis` must name each axis once"
        raise ArgumentValueError(value.graph.function, rule, {"axis": axes, "shape": value.dims})
    return counted
