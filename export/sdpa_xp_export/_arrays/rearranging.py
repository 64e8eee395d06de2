"""Functions that reverse, shift, repeat or hide elements, and that broadcast arrays against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from .._dtypes.dtype import INTEGERS
from .._graph import GraphValue, Length, plain
from .arithmetic import floor_divide
from .creation import arange, as_value, places
from .dispatch import array_function, computed, graph_of
from .elementwise import greater, less, where
from .indexing import item, take
from .manipulation import Axes, axes_of, axis_of, broadcast_to, expand_dims, reshape
from .ops import to_rank
from .ordering import searchsorted
from .reductions import cumulative_sum, sum

__all__ = ["broadcast_arrays", "broadcast_shapes", "flip", "meshgrid", "repeat", "roll", "tile", "tril", "triu"]


@array_function
def flip(value: GraphValue, *, axis: Axes = None) -> GraphValue:
    """Reverse the order of the elements along axes, or along all of them."""
    for position in axes_of(value, axis):
        value = item(value, (*(slice(None),) * position, slice(None, None, -1)))
    return value


@array_function
def roll(value: GraphValue, shift: Any, *, axis: Axes = None) -> GraphValue:
    """Shift elements along axes; those that leave at the end come back at the start."""
    if axis is None:
        return reshape(roll(reshape(value, (-1,)), shift, axis=0), value.shape)
    axes = axes_of(value, axis) if isinstance(axis, int) else tuple(axis_of(value, one) for one in axis)
    shifts = tuple(shift) if isinstance(shift, Sequence) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        rule = "`shift` must be one number, or one for each axis"
        raise ArgumentValueError(value.graph.function, rule, {"shift": shift, "axis": axis})
    for position, count in zip(axes, shifts, strict=True):
        shifted = places(value.graph, value.shape[position]) - count
        length = as_value(value.graph, value.shape[position], least=1)  # a division by 0 fails, also of nothing
        value = take(value, computed("Mod", shifted, length, shape=shifted.dims), axis=position)
    return value


@array_function
def repeat(value: GraphValue, repeats: Any, *, axis: int | None = None) -> GraphValue:
    """Repeat each element along an axis, or those of the flattened array; as often as `repeats` says."""
    if axis is None:
        value, axis = reshape(value, (-1,)), 0
    position = axis_of(value, axis)
    length = value.shape[position]
    if isinstance(repeats, int | Length):
        copies = places(value.graph, length * repeats)
        count = as_value(value.graph, repeats, least=1)
        return take(value, floor_divide(copies, count, exact=False), axis=position)
    counts = value.graph.operand(repeats)
    if counts.elem_type not in INTEGERS or counts.ndim > 1:
        rule = "`repeats` must be an integer, or an array of integers with one axis"
        raise ArgumentTypeError(value.graph.function, rule, {"dtype": counts.elem_type, "shape": counts.dims})
    counts = broadcast_to(to_rank(counts.astype("int64"), 1), (length,))
    ends = cumulative_sum(counts)
    copies = arange(0, sum(counts), length=counts.graph.lengths.fresh("repeated", counts))
    return take(value, searchsorted(ends, copies, side="right"), axis=position)


@array_function
def tile(value: GraphValue, repetitions: Sequence[int]) -> GraphValue:
    """Put copies of an array side by side, as many along each axis as `repetitions` says."""
    rank = max(value.ndim, len(repetitions))
    value = to_rank(value, rank)
    counts = [1] * (rank - len(repetitions)) + [*repetitions]
    shape = tuple(plain(length * count) for length, count in zip(value.shape, counts, strict=True))
    return value.graph.add(
        "Tile", value, value.graph.constant(counts, "int64"), dtype=value.elem_type, shape=shape
    )


def _triangle(name: str, outside: Callable[[Any, Any], GraphValue]) -> Callable[..., GraphValue]:
    """Make a function that keeps a triangle of matrices, and sets the elements outside of it to 0."""

    def function(value: GraphValue, *, k: int = 0) -> GraphValue:
        if value.ndim < 2:
            rule = f"`{name}` needs at least two axes"
            raise ArgumentValueError(value.graph.function, rule, {"shape": value.dims})
        rows, columns = (places(value.graph, length) for length in value.shape[-2:])
        is_outside = outside(columns, expand_dims(rows + k, axis=-1))
        return where(is_outside, value.graph.constant(0, value.elem_type), value)

    return array_function(function, name)


# Not ONNX's Trilu, of which the CPU provider has kernels for few dtypes.
tril, triu = _triangle("tril", greater), _triangle("triu", less)


@array_function
def broadcast_arrays(*arrays: GraphValue) -> tuple[GraphValue, ...]:
    """Broadcast arrays to one shape."""
    graph = graph_of(arrays)
    assert graph is not None  # one of the arrays is a value
    values = [graph.operand(array) for array in arrays]
    shape = Length.in_shape(graph, graph.joint_shape(*(value.dims for value in values)))
    return tuple(broadcast_to(value, shape) for value in values)


def broadcast_shapes(*shapes: Sequence[int | Length]) -> tuple[int | Length, ...]:
    """Return the shape that shapes broadcast to."""
    if not shapes:
        return ()
    graph = graph_of([tuple(shape) for shape in shapes])
    if graph is None:
        return np.broadcast_shapes(*map(tuple, shapes))
    return Length.in_shape(graph, graph.joint_shape(*(tuple(map(plain, shape)) for shape in shapes)))


@array_function
def meshgrid(*arrays: GraphValue, indexing: str = "xy") -> tuple[GraphValue, ...]:
    """Return the coordinates of a grid, one array for each axis."""
    graph = graph_of(arrays)
    assert graph is not None  # one of the arrays is a value
    values = [graph.operand(array) for array in arrays]
    if indexing not in ("xy", "ij") or any(value.ndim > 1 for value in values):
        rule = "the arrays of `meshgrid` must have one axis, and `indexing` must be 'xy' or 'ij'"
        shapes = ", ".join(str(value.dims) for value in values)
        raise ArgumentValueError(graph.function, rule, {"shapes": shapes, "indexing": indexing})
    axes = [*range(len(values))]
    if indexing == "xy":
        axes[:2] = reversed(axes[:2])
    return broadcast_arrays(
        *(
            reshape(value, [-1 if place == axis else 1 for axis in range(len(values))])
            for value, place in zip(values, axes, strict=True)
        )
    )
