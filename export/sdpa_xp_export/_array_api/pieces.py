"""Pieces of graph that the forms share: one function a piece, with what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdpa_xp.checks import HLE
from sdpa_xp_export._array_api import elementwise as functions
from sdpa_xp_export._array_api.arithmetic import computed, kernel_dtype
from sdpa_xp_export._graph.shapes import joint_shape
from sdpa_xp_export.spec import Shape

if TYPE_CHECKING:
    from sdpa_xp_export._graph.value import Value


def at_least(value: Value, number: float) -> Value:
    """value -> Where(value < number, number, value); a NaN stays."""
    return functions.where(value < number, number, value)


def scalar(value: Value) -> Value:
    """(1,) -> ()."""
    return value.graph.add("Squeeze", value, value.graph.constant([0], "int64"), dtype=value.dtype, shape=())


def arange(stop: Value, length: int | str, start: Value | None = None) -> Value:
    """Scalars -> start, start + 1, ... stop - 1, which are `length` numbers; from 0 without a start."""
    zero, one = (stop.graph.constant(number, "int64") for number in (0, 1))
    return stop.graph.add("Range", zero if start is None else start, stop, one, dtype="int64", shape=(length,))


def join(values: Sequence[Value], axis: int = 0, length: int | str | None = None) -> Value:
    """Several -> Concat along `axis`, which then has `length`."""
    first = values[0]
    shape: list[int | str] = list(first.shape)
    shape[axis] = len(values) if length is None else length
    return first.graph.add("Concat", *values, dtype=first.dtype, shape=tuple(shape), axis=axis)


def unsqueeze(value: Value, axis: int) -> Value:
    """value -> value with a new axis of 1 at `axis`."""
    shape = list(value.shape)
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 1)
    axes = value.graph.constant([axis], "int64")
    return value.graph.add("Unsqueeze", value, axes, dtype=value.dtype, shape=tuple(shape))


def to_rank(value: Value, rank: int) -> Value:
    """value -> value with axes of 1 in front, up to `rank` axes."""
    while value.ndim < rank:
        value = unsqueeze(value, 0)
    return value


def squeeze(value: Value, axes: Sequence[int]) -> Value:
    """value -> value without these axes, counted from the front, of length 1."""
    shape = tuple(length for at, length in enumerate(value.shape) if at not in axes)
    at = value.graph.constant(sorted(axes), "int64")
    return value.graph.add("Squeeze", value, at, dtype=value.dtype, shape=shape)


def squeeze_front(value: Value, rank: int) -> Value:
    """value -> value without its first axes, down to `rank` axes; they are of length 1."""
    if value.ndim <= rank:
        return value
    return squeeze(value, range(value.ndim - rank))


def reshape(value: Value, target: Sequence[int], shape: Shape) -> Value:
    """value -> value of `shape`; in `target`, 0 keeps a length and -1 is what is left."""
    if value.shape == shape:
        return value
    return reshape_to(value, value.graph.constant(list(target), "int64"), shape)


def reshape_to(value: Value, target: Value, shape: Shape) -> Value:
    """value, lengths -> value of these lengths."""
    return value.graph.add("Reshape", value, target, dtype=value.dtype, shape=shape)


def expand(value: Value, target: Value, shape: Shape) -> Value:
    """value, lengths -> value that is broadcast to these lengths."""
    joint = joint_shape(value.shape, shape)
    if value.shape == joint:
        return value
    inner = kernel_dtype("Expand", value)
    made = value.graph.add("Expand", value.astype(inner), target, dtype=inner, shape=joint)
    return made.astype(value.dtype)


def transpose(value: Value) -> Value:
    """(..., S, E) -> (..., E, S)."""
    return swap(value, -1, -2)


def swap(value: Value, one: int, other: int) -> Value:
    """value -> value with two axes swapped."""
    perm: list[int] = list(range(value.ndim))
    perm[one], perm[other] = perm[other], perm[one]
    shape = tuple(value.shape[axis] for axis in perm)
    return value.graph.add("Transpose", value, dtype=value.dtype, shape=shape, perm=perm)


def in_layout(value: Value, layout: str) -> Value:
    """(..., heads, length, width) -> as `layout` has it, and back; 2-D has no heads."""
    return value if layout == HLE or value.ndim < 3 else swap(value, -2, -3)


def product(one: Value, other: Value, shape: Shape) -> Value:
    """one, other -> MatMul; in float64 of both with the other sign.

    onnxruntime folds a number that an operand of a MatMul is multiplied with into the MatMul, as a float32; and
    before 1.26 it joins a Transpose and a MatMul of float64 to what has no kernel. It does neither across Neg.
    """
    if one.dtype == "float64":
        one, other = -one, -other
    return computed("MatMul", one, other, shape=shape)


def matmul_grouped(rows: Value, shared: Value) -> Value:
    """rows (..., Hq, L, X), shared (..., H, X, Y) -> (..., Hq, L, Y); head h meets shared head h // G.

    The G = Hq // H heads of a group become rows of one product, so `shared` is never repeated:
    Reshape -> MatMul -> Reshape; where Hq = H, MatMul alone.
    """
    heads, groups = rows.shape[-3], shared.shape[-3]
    batch = joint_shape(rows.shape[:-3], shared.shape[:-3])
    shape = (*batch, heads, rows.shape[-2], shared.shape[-1])
    if heads == groups:
        return product(rows, shared, shape)
    assert isinstance(groups, int)
    assert isinstance(heads, int)
    folded = (*rows.shape[:-3], groups, "rows", rows.shape[-1])
    rows = reshape(rows, [0] * (rows.ndim - 3) + [groups, -1, 0], folded)
    found = product(rows, shared, (*batch, *folded[-3:-1], shape[-1]))
    return reshape(found, [0] * len(batch) + [heads, -1, 0], shape)


def cut(value: Value, bounds: tuple[Value, Value], axis: int, length: int | str) -> Value:
    """value -> its entries from the first bound to the second, which is left out, along `axis`."""
    at, shape = value.graph.constant([axis], "int64"), list(value.shape)
    shape[axis] = length
    return value.graph.add("Slice", value, *bounds, at, dtype=value.dtype, shape=tuple(shape))


def gather(value: Value, index: Value, axis: int) -> Value:
    """value, indices -> its entries at these along `axis`."""
    shape = (*value.shape[:axis], *index.shape, *value.shape[axis + 1 :])
    return value.graph.add("Gather", value, index, dtype=value.dtype, shape=shape, axis=axis)


def reduce(op: str, value: Value, axis: int = -1) -> Value:
    """value -> op over `axis`, which stays with a length of 1; the axis is an input since opset 18, or 13."""
    shape = list(value.shape)
    shape[axis] = 1
    dtype, reduced = value.dtype, tuple(shape)
    if op != "ReduceSum" and value.graph.opset < 18:
        return value.graph.add(op, value, dtype=dtype, shape=reduced, axes=[axis], keepdims=1)
    axes = value.graph.constant([axis], "int64")
    return value.graph.add(op, value, axes, dtype=dtype, shape=reduced, keepdims=1)


def ones_column(value: Value) -> Value:
    """value (..., N) -> ones (N, 1), by which a product sums its last axis.

    Shape -> Expand. It is no ReduceSum, which in onnxruntime gives the wrong shape where there is no element.
    """
    graph, last = value.graph, value.ndim - 1
    length = graph.add("Shape", value, dtype="int64", shape=(1,), start=last, end=last + 1)
    target = join([length, graph.constant([1], "int64")])
    return graph.add(
        "Expand", graph.constant([[1]], value.dtype), target, dtype=value.dtype, shape=(value.shape[last], 1)
    )


def attending(allowed: Value) -> Value:
    """allowed (..., Hq, L, S), any axis of which may be 1 -> boolean (..., Hq, L, 1): is there a key.

    Cast -> MatMul with a column of ones -> Greater 0.
    """
    counted = to_rank(allowed, 2).astype("float32")
    shape = (*counted.shape[:-1], 1)
    return allowed.graph.add("MatMul", counted, ones_column(counted), dtype="float32", shape=shape) > 0.0


def attended(allowed: Value, groups: int) -> Value:
    """allowed (..., Hq, L, S), any axis of which may be 1 -> boolean (..., H, S, 1): does any query attend.

    Cast -> ReduceSum over L -> ReduceSum over the heads of a group -> Transpose -> Greater 0.
    """
    count = reduce("ReduceSum", to_rank(allowed, 2).astype("float32"), -2)
    heads = count.shape[-3] if count.ndim >= 3 else 1
    if isinstance(heads, int) and heads not in (1, groups):
        target = [0] * (count.ndim - 3) + [groups, heads // groups, -1]
        count = reshape(count, target, (*count.shape[:-3], groups, heads // groups, count.shape[-1]))
        count = reduce("ReduceSum", count, -2)
    return transpose(count) > 0.0
