"""The functions of the array API that move, join and repeat the elements of values."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sdpa_xp.checks import message
from sdpa_xp_export._array_api import pieces
from sdpa_xp_export._array_api.arithmetic import operands, together
from sdpa_xp_export._array_api.axes import axes_of, axis_of
from sdpa_xp_export._array_api.indexing import item
from sdpa_xp_export._dtypes.promotion import INTEGERS
from sdpa_xp_export._graph.lengths import has_names, named
from sdpa_xp_export._graph.shapes import broadcasts_to, joint_shape
from sdpa_xp_export._graph.traced_graph import Trace, trace_of
from sdpa_xp_export._graph.value import Value
from sdpa_xp_export.spec import Shape, total


def sizes(trace: Trace, shape: Shape) -> Value:
    """Lengths -> (n,) integers."""
    if all(isinstance(length, int) for length in shape):
        return trace.constant(list(shape), "int64")
    return pieces.join([trace.length(length) for length in shape], length=len(shape))


def reshape(value: Value, shape: Sequence[Any], *, copy: object = None) -> Value:
    """value -> Reshape; one length may be -1, what is left."""
    del copy  # a value has no memory
    shape = (shape,) if isinstance(shape, int | str) else tuple(shape)
    shape = tuple(each if isinstance(each, str) else operator.index(each) for each in shape)
    left = [axis for axis, length in enumerate(shape) if length == -1]
    made = list(shape)
    for axis in left:
        made[axis] = _left(value.shape, [length for length in shape if length != -1])
    kept = [0 if value.shape[axis : axis + 1] == (length,) else length for axis, length in enumerate(shape)]
    target = pieces.join([trace_of(value).length(each) for each in kept]) if has_names(kept) else None
    target = value.graph.constant(kept, "int64") if target is None else target
    found = pieces.reshape_to(value, target, tuple(made))
    for axis in left:
        if isinstance(made[axis], str):
            trace_of(value).having(found, axis, made[axis])
    return found


def _left(shape: Shape, taken: list[Any]) -> int | str:
    """What -1 stands for: the product of `shape` over that of `taken`, as a number or a name."""
    names = Counter(each for each in shape if isinstance(each, str))
    names.subtract(each for each in taken if isinstance(each, str))
    one, other = (math.prod(each for each in side if isinstance(each, int)) for side in (shape, taken))
    parts = [name for name, count in names.items() for _ in range(count)]
    if min(names.values(), default=0) >= 0 and other and one % other == 0:
        if not parts:
            return one // other
        if len(parts) == 1 and one == other:
            return parts[0]
    return named("times", *parts, one, "over", *[n for n in names if names[n] < 0], other)


def permute_dims(value: Value, axes: Sequence[int]) -> Value:
    """value -> Transpose."""
    perm = axes_of(value, axes)
    if len(perm) != value.ndim:
        rule = "`axes` must name each axis"
        raise ValueError(message(value.graph.function, rule, {"axes": axes, "shape": value.shape}))
    shape = tuple(value.shape[axis] for axis in perm)
    return value.graph.add("Transpose", value, dtype=value.dtype, shape=shape, perm=list(perm))


def matrix_transpose(value: Value) -> Value:
    """(..., M, N) -> (..., N, M)."""
    _at_least_two_axes(value, "matrix_transpose")
    return pieces.transpose(value)


def _at_least_two_axes(value: Value, name: str) -> None:
    if value.ndim < 2:
        rule = f"`{name}` must be of at least two axes"
        raise ValueError(message(value.graph.function, rule, {"shape": value.shape}))


def moveaxis(value: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    """value -> Transpose."""
    sources, destinations = axes_of(value, source), axes_of(value, destination)
    if len(sources) != len(destinations):
        rule = "`source` and `destination` must be as many axes"
        got = {"source": source, "destination": destination}
        raise ValueError(message(value.graph.function, rule, got))
    axes = [axis for axis in range(value.ndim) if axis not in sources]
    for to, axis in sorted(zip(destinations, sources, strict=True)):
        axes.insert(to, axis)
    return permute_dims(value, axes)


def expand_dims(value: Value, *, axis: int = 0) -> Value:
    """value -> Unsqueeze."""
    return pieces.unsqueeze(value, axis_of(value, axis, 1))


def squeeze(value: Value, axis: int | Sequence[int]) -> Value:
    """value -> Squeeze of axes of length 1."""
    axes = axes_of(value, axis)
    if any(isinstance(value.shape[each], int) and value.shape[each] != 1 for each in axes):
        rule = "`axis` must name axes of length 1"
        raise ValueError(message(value.graph.function, rule, {"axis": axis, "shape": value.shape}))
    return pieces.squeeze(value, axes)


def broadcast_to(value: Value, shape: Sequence[Any]) -> Value:
    """value -> Expand."""
    target = tuple(shape)
    if not broadcasts_to(value.shape, target):
        rule = "`x` must broadcast to `shape`"
        raise ValueError(message(value.graph.function, rule, {"x.shape": value.shape, "shape": target}))
    return value if value.shape == target else pieces.expand(value, sizes(trace_of(value), target), target)


def concat(values: Sequence[Value], *, axis: int | None = 0) -> Value:
    """values -> Concat, flattened for no axis; a length that is joined is a sum."""
    one, *others = values
    for other in others:
        one, other = together("concat", one, other)
    values = [each.astype(one.dtype) for each in values]
    if axis is None:
        values, axis = [reshape(each, (-1,)) for each in values], 0
    at = axis_of(values[0], axis)
    _alike(values, at)
    length = values[0].shape[at]
    for each in values[1:]:
        length = total(length, each.shape[at])
    made = pieces.join(values, at, length)
    if len(values) == 2 and isinstance(made.graph, Trace):
        made.graph.joined[made.name] = at - made.ndim, values[0], values[1]
    return made


def _alike(values: Sequence[Value], axis: int | None) -> None:
    """Arrays that are joined have the same lengths, as far as these are known, except along `axis`."""
    ranks = {each.ndim for each in values}
    lengths = [
        {each.shape[at] for each in values if isinstance(each.shape[at], int)}
        for at in range(min(ranks))
        if at != axis
    ]
    if len(ranks) > 1 or any(len(known) > 1 for known in lengths):
        rule = "arrays that are joined must have the same shape" + (
            "" if axis is None else ", except along `axis`"
        )
        got = {"shapes": ", ".join(str(each.shape) for each in values)}
        raise ValueError(message(values[0].graph.function, rule, got))


def stack(values: Sequence[Value], *, axis: int = 0) -> Value:
    """values -> Unsqueeze, Concat."""
    _alike(values, None)
    at = axis_of(values[0], axis, 1)
    return concat([pieces.unsqueeze(each, at) for each in values], axis=at)


def unstack(value: Value, *, axis: int = 0) -> tuple[Value, ...]:
    """value -> its entries along an axis whose length is known."""
    at = axis_of(value, axis)
    count, before = value.shape[at], (slice(None),) * at
    if isinstance(count, str):
        rule = "`unstack` must be along an axis whose length is known"
        raise TypeError(message(value.graph.function, rule, {"axis": axis, "shape": value.shape}))
    return tuple(item(value, (*before, index)) for index in range(count))


def take(value: Value, indices: Value, *, axis: int | None = None) -> Value:
    """value, indices of any shape -> Gather; one axis needs no name."""
    if indices.dtype not in INTEGERS:
        rule = "`indices` must be integers"
        raise TypeError(message(value.graph.function, rule, {"indices.dtype": indices.dtype}))
    if axis is None and value.ndim != 1:
        rule = "`axis` must be given where there is not just one"
        raise ValueError(message(value.graph.function, rule, {"shape": value.shape}))
    index = indices if indices.dtype == "int32" else indices.astype("int64")
    return pieces.gather(value, index, axis_of(value, axis or 0))


def matmul(one: Value, other: Value) -> Value:
    """(..., M, K), (..., K, N) -> MatMul; a vector is a row on the left, and a column on the right."""
    one, other = operands("matmul", "numeric", one, other)
    if not one.ndim or not other.ndim:
        rule = "the operands of `matmul` must have axes"
        raise ValueError(
            message(one.graph.function, rule, {"first.shape": one.shape, "second.shape": other.shape})
        )
    left = one.shape[:-1]
    right = other.shape[-1:] if other.ndim > 1 else ()
    if one.shape[-1] != other.shape[-2 if other.ndim > 1 else -1]:
        rule = "the last axis of the first and the last but one of the second must be equal"
        got = {"first.shape": one.shape, "second.shape": other.shape}
        raise ValueError(message(one.graph.function, rule, got))
    batch = joint_shape(one.shape[:-2], other.shape[:-2])
    return pieces.product(one, other, (*batch, *left[-1:], *right))
