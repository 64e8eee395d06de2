"""Pieces of graph that the forms share: one function a piece, with what goes in and what comes out."""

from __future__ import annotations

import math
import typing

import numpy as np

from sdpa_xp.checks import broadcast
from sdpa_xp_export.graph import ONNX_DTYPE, Graph, Value
from sdpa_xp_export.spec import Shape


def cast(graph: Graph, value: Value, dtype: str) -> Value:
    """value -> Cast(value); the value itself where it has the dtype."""
    if value.dtype == dtype:
        return value
    return graph.add("Cast", value, dtype=dtype, shape=value.shape, to=ONNX_DTYPE[dtype])


def combine(graph: Graph, op: str, one: Value, other: Value, dtype: str | None = None) -> Value:
    """one, other -> op(one, other), elementwise with broadcasting."""
    return graph.add(op, one, other, dtype=dtype or one.dtype, shape=joint_shape(one.shape, other.shape))


def with_number(graph: Graph, op: str, value: Value, number: float) -> Value:
    """value -> op(value, number)."""
    return combine(graph, op, value, graph.constant(number, value.dtype))


def times(graph: Graph, value: Value, number: float) -> Value:
    """value -> value * number.

    In float64 as Neg(value * -number): onnxruntime folds a Mul that stands right before a MatMul into it, as a
    float32.
    """
    if value.dtype != "float64":
        return with_number(graph, "Mul", value, number)
    return graph.add("Neg", with_number(graph, "Mul", value, -number), dtype=value.dtype, shape=value.shape)


def where(graph: Graph, condition: Value, value: Value, number: float) -> Value:
    """condition, value -> value where condition holds, else number."""
    shape = joint_shape(condition.shape, value.shape)
    other = graph.constant(number, value.dtype)
    return graph.add("Where", condition, value, other, dtype=value.dtype, shape=shape)


def at_least(graph: Graph, value: Value, number: float) -> Value:
    """value -> Where(value < number, number, value); a NaN stays."""
    low = combine(graph, "Less", value, graph.constant(number, value.dtype), dtype="bool")
    return where(graph, graph.add("Not", low, dtype="bool", shape=low.shape), value, number)


def unsqueeze(graph: Graph, value: Value, axis: int) -> Value:
    """value -> value with a new axis of 1 at `axis`."""
    shape = list(value.shape)
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 1)
    axes = graph.constant([axis], "int64")
    return graph.add("Unsqueeze", value, axes, dtype=value.dtype, shape=tuple(shape))


def to_rank(graph: Graph, value: Value, rank: int) -> Value:
    """value -> value with axes of 1 in front, up to `rank` axes."""
    while value.rank < rank:
        value = unsqueeze(graph, value, 0)
    return value


def squeeze_front(graph: Graph, value: Value, rank: int) -> Value:
    """value -> value without its first axes, down to `rank` axes; they are of length 1."""
    if value.rank == rank:
        return value
    extra = value.rank - rank
    axes = graph.constant(list(range(extra)), "int64")
    return graph.add("Squeeze", value, axes, dtype=value.dtype, shape=value.shape[extra:])


def transpose(graph: Graph, value: Value) -> Value:
    """(..., S, E) -> (..., E, S)."""
    *front, rows, columns = range(value.rank)
    shape = (*value.shape[:-2], value.shape[-1], value.shape[-2])
    return graph.add("Transpose", value, dtype=value.dtype, shape=shape, perm=[*front, columns, rows])


def matmul_grouped(graph: Graph, rows: Value, shared: Value) -> Value:
    """rows (..., Hq, L, X), shared (..., H, X, Y) -> (..., Hq, L, Y); head h meets shared head h // G.

    The G = Hq // H heads of a group become rows of one product, so `shared` is never repeated:
    Reshape -> MatMul -> Reshape; where Hq = H, MatMul alone.
    """
    heads, groups = rows.shape[-3], shared.shape[-3]
    batch = joint_shape(rows.shape[:-3], shared.shape[:-3])
    shape = (*batch, heads, rows.shape[-2], shared.shape[-1])
    if heads == groups:
        return graph.add("MatMul", rows, shared, dtype=rows.dtype, shape=shape)
    folded = (*rows.shape[:-3], groups, "rows", rows.shape[-1])
    to_groups = graph.constant([0] * (rows.rank - 3) + [groups, -1, 0], "int64")  # 0 keeps a length
    rows = graph.add("Reshape", rows, to_groups, dtype=rows.dtype, shape=folded)
    product = graph.add("MatMul", rows, shared, dtype=rows.dtype, shape=(*batch, *folded[-3:-1], shape[-1]))
    to_heads = graph.constant([0] * len(batch) + [heads, -1, 0], "int64")
    return graph.add("Reshape", product, to_heads, dtype=rows.dtype, shape=shape)


def length(graph: Graph, value: Value, axis: int) -> Value:
    """value -> its length along `axis` (counted from the back), shape (1,)."""
    known = value.shape[axis]
    if isinstance(known, int):
        return graph.constant([known], "int64")
    start = value.rank + axis
    return graph.add("Shape", value, dtype="int64", shape=(1,), start=start, end=start + 1)


def first_keys(graph: Graph, value: Value, count: Value, axis: int) -> Value:
    """value -> its first `count` entries along `axis`; the value itself where that axis broadcasts."""
    if value.shape[axis] == 1:
        return value
    start, at = graph.constant([0], "int64"), graph.constant([axis], "int64")
    shape = list(value.shape)
    shape[axis] = "first_keys"
    return graph.add("Slice", value, start, count, at, dtype=value.dtype, shape=tuple(shape))


def causal(graph: Graph, query: Value, key: Value) -> Value:
    """query (..., L, E), key (..., S, E) -> boolean (L, S), True where j <= i."""

    def index(value: Value) -> Value:
        zero, one = graph.constant(0, "int64"), graph.constant(1, "int64")
        axis = graph.constant([0], "int64")
        stop = graph.add("Squeeze", length(graph, value, -2), axis, dtype="int64", shape=())
        return graph.add("Range", zero, stop, one, dtype="int64", shape=(value.shape[-2],))

    rows = unsqueeze(graph, index(query), 1)
    return combine(graph, "LessOrEqual", index(key), rows, dtype="bool")


def not_masked(graph: Graph, bias: Value) -> Value:
    """bias -> boolean, True where it is not -inf; a NaN is not masked."""
    equal = combine(graph, "Equal", bias, graph.constant(-math.inf, bias.dtype), dtype="bool")
    return graph.add("Not", equal, dtype="bool", shape=bias.shape)


def add_biases(graph: Graph, one: Value, other: Value) -> Value:
    """one, other -> one + other, -inf where either is, and elsewhere at least the smallest finite number.

    -inf + inf would be NaN, and two of the smallest finite numbers, which do not mask, would become -inf.
    """
    allowed = combine(graph, "And", not_masked(graph, one), not_masked(graph, other))
    total = at_least(graph, combine(graph, "Add", one, other), float(np.finfo(one.dtype).min))
    return where(graph, allowed, total, -math.inf)


def attended(graph: Graph, allowed: Value, groups: int) -> Value:
    """allowed (..., Hq, L, S), any axis of which may be 1 -> boolean (..., H, S, 1): does any query attend.

    Cast -> ReduceSum over L -> ReduceSum over the heads of a group -> Transpose -> Greater 0.
    """
    count = _sum_rows(graph, cast(graph, allowed, "float32"))
    heads = count.shape[-3] if count.rank >= 3 else 1
    if isinstance(heads, int) and heads not in (1, groups):
        split = [0] * (count.rank - 3) + [groups, heads // groups, -1]
        shape = (*count.shape[:-3], groups, heads // groups, count.shape[-1])
        count = graph.add("Reshape", count, graph.constant(split, "int64"), dtype="float32", shape=shape)
        count = _sum_rows(graph, count)
    return combine(graph, "Greater", transpose(graph, count), graph.constant(0.0, "float32"), dtype="bool")


def joint_shape(*shapes: Shape) -> Shape:
    """The shape that `shapes` broadcast to."""
    # It compares lengths and never counts with them, so a name serves where the type says int.
    joint = broadcast(*(typing.cast(tuple[int, ...], shape) for shape in shapes))
    if joint is None:
        raise AssertionError(f"the exporter wrote a graph that does not broadcast: {shapes}")
    return joint


def _sum_rows(graph: Graph, value: Value) -> Value:
    """(..., L, S) -> (..., 1, S)."""
    shape = (*value.shape[:-2], 1, value.shape[-1])
    axes = graph.constant([-2], "int64")
    return graph.add("ReduceSum", value, axes, dtype=value.dtype, shape=shape, keepdims=1)
