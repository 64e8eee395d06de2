"""The functions of the array API that move, join and repeat the elements of values."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp_export._array_api import ops
from sdpa_xp_export._array_api.axes import axes_of, axis_of
from sdpa_xp_export._array_api.dispatch import array_function
from sdpa_xp_export._array_api.indexing import item
from sdpa_xp_export._array_api.operators import operands, promoted
from sdpa_xp_export._dtypes.promotion import INTEGERS
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export._graph.lengths import Length, has_names, joined_name, plain
from sdpa_xp_export._graph.shapes import broadcasts_to, joint_shape
from sdpa_xp_export._graph.traced_graph import TracedGraph, name_length, traced_graph_of
from sdpa_xp_export.spec import SymbolicShape, total


@array_function
def reshape(value: GraphValue, shape: Sequence[Any], *, copy: object = None) -> GraphValue:
    """value -> Reshape; one length may be -1, which is what is left."""
    del copy  # a value has no memory
    shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    shape = tuple(plain(n) if isinstance(n, Length) else operator.index(n) for n in shape)
    left = [axis for axis, length in enumerate(shape) if length == -1]
    if left and 0 in shape:
        rule = "`shape` must not have -1 beside a length of 0, which leaves it open"
        raise ArgumentValueError(value.graph.function, rule, {"x.shape": value.dims, "shape": shape})
    stated = list(shape)
    for axis in left:
        stated[axis] = _remaining_length(value.dims, [length for length in shape if length != -1])
    # A length that stays where it is needs not be read: in the target of Reshape 0 stands for it, unless a
    # length is 0.
    is_empty = 0 in shape
    kept = [
        0 if not is_empty and value.dims[axis : axis + 1] == (length,) else length
        for axis, length in enumerate(shape)
    ]
    if has_names(kept):
        target = ops.join([traced_graph_of(value).length(length) for length in kept])
    else:
        target = value.graph.constant(kept, "int64")
    reshaped = ops.reshape_to(value, target, tuple(stated), **({"allowzero": 1} if is_empty else {}))
    for axis in left:
        name_length(reshaped, axis, stated[axis])
    return reshaped


def _remaining_length(shape: SymbolicShape, others: list[Any]) -> int | str:
    """Return the length that -1 stands for: the product of `shape` divided by the product of `others`."""
    names = Counter(length for length in shape if isinstance(length, str))
    names.subtract(length for length in others if isinstance(length, str))
    one, other = (math.prod(length for length in side if isinstance(length, int)) for side in (shape, others))
    parts = [name for name, count in names.items() for _ in range(count)]
    if min(names.values(), default=0) >= 0 and other and one % other == 0:
        if not parts:
            return one // other
        if len(parts) == 1 and one == other:
            return parts[0]
    return joined_name("times", *parts, one, "over", *[n for n in names if names[n] < 0], other)


@array_function
def permute_dims(value: GraphValue, axes: Sequence[int]) -> GraphValue:
    """value -> Transpose."""
    perm = axes_of(value, axes)
    if len(perm) != value.ndim:
        rule = "`axes` must name each axis"
        raise ArgumentValueError(value.graph.function, rule, {"axes": axes, "shape": value.dims})
    return ops.permute(value, perm)


@array_function
def matrix_transpose(value: GraphValue) -> GraphValue:
    """(..., M, N) -> (..., N, M)."""
    if value.ndim < 2:
        rule = "`matrix_transpose` needs at least two axes"
        raise ArgumentValueError(value.graph.function, rule, {"shape": value.dims})
    return ops.transpose(value)


@array_function
def moveaxis(value: GraphValue, source: int | Sequence[int], destination: int | Sequence[int]) -> GraphValue:
    """value -> Transpose."""
    sources, destinations = axes_of(value, source), axes_of(value, destination)
    if len(sources) != len(destinations):
        rule = "`source` and `destination` must have the same number of axes"
        got = {"source": source, "destination": destination}
        raise ArgumentValueError(value.graph.function, rule, got)
    axes = [axis for axis in range(value.ndim) if axis not in sources]
    for to, axis in sorted(zip(destinations, sources, strict=True)):
        axes.insert(to, axis)
    return permute_dims(value, axes)


@array_function
def expand_dims(value: GraphValue, *, axis: int = 0) -> GraphValue:
    """value -> Unsqueeze."""
    return ops.unsqueeze(value, axis_of(value, axis, 1))


@array_function
def squeeze(value: GraphValue, axis: int | Sequence[int]) -> GraphValue:
    """value -> Squeeze of axes of length 1."""
    axes = axes_of(value, axis)
    if any(isinstance(value.dims[one], int) and value.dims[one] != 1 for one in axes):
        rule = "`axis` must name axes of length 1"
        raise ArgumentValueError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
    return ops.squeeze(value, axes)


@array_function
def broadcast_to(value: GraphValue, shape: Sequence[Any]) -> GraphValue:
    """value -> Expand."""
    target = tuple(map(plain, shape))
    if not broadcasts_to(value.dims, target):
        rule = "`x` must broadcast to `shape`"
        raise ArgumentValueError(value.graph.function, rule, {"x.shape": value.dims, "shape": target})
    if value.dims == target:
        return value
    graph = traced_graph_of(value)
    if has_names(target):
        lengths = ops.join([graph.length(length) for length in target], length=len(target))
    else:
        lengths = graph.constant(list(target), "int64")
    return ops.expand(value, lengths, target)


@array_function
def concat(values: Sequence[GraphValue], *, axis: int | None = 0) -> GraphValue:
    """values -> Concat, flattened for no axis; a length that is joined is a sum."""
    one, *others = values
    for other in others:
        one, other = promoted("concat", one, other)
    values = [value.astype(one.elem_type) for value in values]
    if axis is None:
        values, axis = [reshape(value, (-1,)) for value in values], 0
    position = axis_of(values[0], axis)
    _check_alike(values, position)
    length = values[0].dims[position]
    for value in values[1:]:
        length = total(length, value.dims[position])
    joined = ops.join(values, position, length)
    if len(values) == 2 and isinstance(joined.graph, TracedGraph):
        joined.graph.concatenated[joined.name] = position - joined.ndim, values[0], values[1]
    return joined


def _check_alike(values: Sequence[GraphValue], axis: int | None) -> None:
    """Check that all values have the same lengths, as far as these are known, except along `axis`."""
    ranks = {value.ndim for value in values}
    lengths = [
        {value.dims[position] for value in values if isinstance(value.dims[position], int)}
        for position in range(min(ranks))
        if position != axis
    ]
    if len(ranks) > 1 or any(len(known) > 1 for known in lengths):
        rule = "arrays that are joined must have the same shape" + (
            "" if axis is None else ", except along `axis`"
        )
        got = {"shapes": ", ".join(str(value.dims) for value in values)}
        raise ArgumentValueError(values[0].graph.function, rule, got)


@array_function
def stack(values: Sequence[GraphValue], *, axis: int = 0) -> GraphValue:
    """values -> Unsqueeze, Concat."""
    _check_alike(values, None)
    position = axis_of(values[0], axis, 1)
    return concat([ops.unsqueeze(value, position) for value in values], axis=position)


@array_function
def unstack(value: GraphValue, *, axis: int = 0) -> tuple[GraphValue, ...]:
    """value -> its entries along an axis, whose length must be known."""
    position = axis_of(value, axis)
    count, before = value.dims[position], (slice(None),) * position
    if isinstance(count, str):
        rule = "`unstack` must be along an axis whose length is known"
        raise ArgumentTypeError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
    return tuple(item(value, (*before, index)) for index in range(count))


@array_function
def take(value: GraphValue, indices: GraphValue, *, axis: int | None = None) -> GraphValue:
    """value, indices of any shape -> Gather; `axis` may be left out if there is just one."""
    if indices.elem_type not in INTEGERS:
        rule = "`indices` must be integers"
        raise ArgumentTypeError(value.graph.function, rule, {"indices.elem_type": indices.elem_type})
    if axis is None and value.ndim != 1:
        rule = "`axis` must be given if the array has more than one axis"
        raise ArgumentValueError(value.graph.function, rule, {"shape": value.dims})
    index = indices if indices.elem_type == "int32" else indices.astype("int64")
    return ops.gather(value, index, axis_of(value, axis or 0))


@array_function
def matmul(one: GraphValue, other: GraphValue) -> GraphValue:
    """(..., M, K), (..., K, N) -> MatMul; a vector is a row on the left, and a column on the right."""
    one, other = operands("matmul", "numeric", one, other)
    if not one.ndim or not other.ndim:
        rule = "the operands of `matmul` must have axes"
        raise ArgumentValueError(
            one.graph.function, rule, {"first.shape": one.dims, "second.shape": other.dims}
        )
    left = one.dims[:-1]
    right = other.dims[-1:] if other.ndim > 1 else ()
    if one.dims[-1] != other.dims[-2 if other.ndim > 1 else -1]:
        rule = "the last axis of the first operand must be as long as the last but one of the second"
        got = {"first.shape": one.dims, "second.shape": other.dims}
        raise ArgumentValueError(one.graph.function, rule, got)
    if one.dims[-1] == 0 and one.elem_type == "uint64":  # for which onnxruntime fails
        rule = "`matmul` of uint64 must sum at least one product"
        got = {"first.shape": one.dims, "second.shape": other.dims}
        raise ArgumentValueError(one.graph.function, rule, got, "Convert both operands to int64.")
    batch = joint_shape(one.dims[:-2], other.dims[:-2])
    return ops.product(one, other, (*batch, *left[-1:], *right))
