"""Sorting, the places of extremes, searches in sorted numbers, and the unique elements of arrays.

NaN is larger than each number, as in NumPy. Equal elements keep their order, as TopK takes the first one first.
How many elements are unique is known only when the graph runs. Each NaN is unique, since no NaN equals another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from sdpa_xp.errors import ArgumentValueError

from .._dtypes.dtype import FLOATING
from .._graph import GraphValue, has_names
from . import ops
from .creation import as_value, places
from .dispatch import admitted, array_function, operands, promoted
from .elementwise import equal, isnan, less, less_equal, maximum, minimum, not_equal, where
from .indexing import nonzero, take, take_along_axis
from .manipulation import axis_of, concat, expand_dims, moveaxis, reshape, squeeze
from .reductions import any, count_nonzero, cumulative_sum, max, min

__all__ = ["argmax", "argmin", "argsort", "isin", "searchsorted"]
__all__ += ["sort", "unique_all", "unique_counts", "unique_inverse", "unique_values"]

LEAST = -(2**63)


@array_function
def argsort(value: GraphValue, *, axis: int = -1, descending: bool = False, stable: bool = True) -> GraphValue:
    """Return the indices that sort along an axis; equal elements keep their order."""
    del stable  # every sort is
    number = admitted("argsort", "numeric", value)
    if value.graph.runtime.is_openvino:
        rule = "a graph for openvino must not sort, since OpenVINO leaves the order of equal elements open"
        raise ArgumentValueError(
            value.graph.function, rule, {"dtype": value.elem_type}, "Export for onnxruntime."
        )
    position = axis_of(number, axis)
    last = moveaxis(number, position, -1)
    order = _top(_sortable(last), descending)
    if last.elem_type in FLOATING:  # sorted as infinities, which a second sort parts from NaN
        is_nan = take_along_axis(isnan(last).astype("int32"), order)
        order = take_along_axis(order, _top(is_nan, descending))
    return moveaxis(order, -1, position)


@array_function
def sort(value: GraphValue, *, axis: int = -1, descending: bool = False, stable: bool = True) -> GraphValue:
    """Sort along an axis."""
    number = admitted("sort", "numeric", value)
    order = argsort(number, axis=axis, descending=descending, stable=stable)
    return take_along_axis(number, order, axis=axis)


def _sortable(value: GraphValue) -> GraphValue:
    """Convert numbers to a dtype that TopK has a kernel for, in the same order; NaN becomes infinite."""
    dtype = value.elem_type
    if dtype in FLOATING:
        value = where(isnan(value), math.inf, value)
        return value.astype("float32") if dtype == "bfloat16" else value
    if dtype == "uint64":  # in the order of signed numbers
        return value.astype("int64") + LEAST
    return value.astype({"int64": "int64", "uint32": "int64"}.get(dtype, "int32"))


def _top(value: GraphValue, descending: bool) -> GraphValue:
    """Return the indices that sort the last axis."""
    graph, known = value.graph, value.dims
    count = ops.length_of(value, value.ndim - 1)
    may_be_empty = has_names(known[:-1]) or 0 in known[:-1]
    if may_be_empty:  # onnxruntime 1.23 ends the process if it takes elements of no rows; then none are taken
        size = graph.add("Size", value, dtype="int64", shape=())
        count = count * minimum(size, 1)
    shapes = [(value.elem_type, known), ("int64", known)]
    indices = graph.add_many("TopK", value, count, outputs=shapes, largest=int(descending))[1]
    if may_be_empty:
        indices = graph.add("Reshape", indices, ops.shape_of(value), dtype="int64", shape=known, allowzero=1)
    return indices


@array_function
def argmax(value: GraphValue, *, axis: int | None = None, keepdims: bool = False) -> GraphValue:
    """Return the index of the largest number, of the first one among equals, or of the first NaN."""
    return _place("argmax", max, value, axis, keepdims)


@array_function
def argmin(value: GraphValue, *, axis: int | None = None, keepdims: bool = False) -> GraphValue:
    """Return the index of the smallest number, of the first one among equals, or of the first NaN."""
    return _place("argmin", min, value, axis, keepdims)


def _place(
    name: str, extreme: Callable[..., GraphValue], value: GraphValue, axis: int | None, keepdims: bool
) -> GraphValue:
    number = admitted(name, "numeric", value)
    if axis is None:
        flat = _place(name, extreme, reshape(number, (-1,)), 0, False)
        return ops.to_rank(flat, number.ndim) if keepdims else flat
    position = axis_of(number, axis)
    # Not of the numbers: onnxruntime's ArgMax misses NaN, and has no kernel for some integers.
    is_extreme = equal(number, extreme(number, axis=position, keepdims=True))
    is_extreme = is_extreme | isnan(number) if number.elem_type in FLOATING else is_extreme
    shape = (*number.dims[:position], 1, *number.dims[position + 1 :])
    place = number.graph.add("ArgMax", is_extreme.astype("int32"), dtype="int64", shape=shape, axis=position)
    return place if keepdims else squeeze(place, position)


@array_function
def searchsorted(
    one: GraphValue, other: Any, *, side: str = "left", sorter: GraphValue | None = None
) -> GraphValue:
    """Return where numbers go in a sorted array: how many of its elements are smaller, or not larger."""
    ordered, number = operands("searchsorted", "numeric", one, other)
    if ordered.ndim != 1 or side not in ("left", "right"):
        rule = "the first argument of `searchsorted` must have one axis, and `side` must be 'left' or 'right'"
        raise ArgumentValueError(ordered.graph.function, rule, {"shape": ordered.dims, "side": side})
    if sorter is not None:
        ordered = take(ordered, ordered.graph.operand(sorter))
    # Each number is compared with all elements: a search in steps would be a loop.
    wanted = expand_dims(number, axis=-1)
    is_before = (less if side == "left" else less_equal)(ordered, wanted)
    if number.elem_type in FLOATING:
        is_before = is_before | (isnan(wanted) & (~isnan(ordered) if side == "left" else isnan(wanted)))
    return count_nonzero(is_before, axis=-1)


class UniqueAll(NamedTuple):
    """The unique elements, where each stands first, the place of each element among them, and their counts."""

    values: GraphValue
    indices: GraphValue
    inverse_indices: GraphValue
    counts: GraphValue


class UniqueCounts(NamedTuple):
    """The unique elements and their counts."""

    values: GraphValue
    counts: GraphValue


class UniqueInverse(NamedTuple):
    """The unique elements, and the place of each element among them."""

    values: GraphValue
    inverse_indices: GraphValue


@array_function
def unique_all(value: GraphValue) -> UniqueAll:
    """Return the unique elements in ascending order, with their first places, an inverse and counts."""
    flat = reshape(value, (-1,))
    order = argsort(flat.astype("uint8") if flat.elem_type == "bool" else flat)
    ordered = take(flat, order)
    steps = places(value.graph, flat.shape[0])
    begins = equal(steps, 0) | not_equal(ordered, take(ordered, maximum(steps - 1, 0, exact=False)))
    (starts,) = nonzero(begins)
    numbered = cumulative_sum(begins.astype("int64")) - 1
    ends = concat([starts[1:], reshape(as_value(value.graph, flat.shape[0]), (1,))])
    return UniqueAll(
        values=take(ordered, starts),
        indices=take(order, starts),
        inverse_indices=reshape(take(numbered, argsort(order)), value.shape),
        counts=ends[: starts.shape[0]] - starts,
    )


@array_function
def unique_counts(value: GraphValue) -> UniqueCounts:
    """Return the unique elements in ascending order, and how often each of them is there."""
    unique = unique_all(value)
    return UniqueCounts(unique.values, unique.counts)


@array_function
def unique_inverse(value: GraphValue) -> UniqueInverse:
    """Return the unique elements in ascending order, and the place of each element among them."""
    unique = unique_all(value)
    return UniqueInverse(unique.values, unique.inverse_indices)


@array_function
def unique_values(value: GraphValue) -> GraphValue:
    """Return the unique elements in ascending order."""
    return unique_all(value).values


@array_function
def isin(one: Any, other: Any, *, invert: bool = False) -> GraphValue:
    """Return whether each element of the first array is in the second one."""
    first, second = promoted("isin", one, other)
    is_in = any(equal(expand_dims(first, axis=-1), reshape(second, (-1,))), axis=-1)
    return ~is_in if invert else is_in
