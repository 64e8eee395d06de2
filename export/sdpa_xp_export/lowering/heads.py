"""Heads: where they stand in a layout, groups that share a key head, and what is counted over a group."""

from __future__ import annotations

from sdpa_xp._checks.shapes import HLE
from sdpa_xp_export._arrays import namespace as xp
from sdpa_xp_export._arrays import ops
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export._graph.lengths import joint_shape


def in_layout(value: GraphValue, layout: str) -> GraphValue:
    """(..., heads, length, width) -> the axes in the order of `layout`, and back; 2-D has no heads."""
    return value if layout == HLE or value.ndim < 3 else xp.moveaxis(value, -2, -3)


def matmul_grouped(rows: GraphValue, shared: GraphValue) -> GraphValue:
    """rows (..., Hq, L, X), shared (..., H, X, Y) -> (..., Hq, L, Y); head h meets shared head h // G.

    The G = Hq // H heads of a group become rows of one product, so `shared` is never repeated:
    Reshape -> MatMul -> Reshape. With Hq = H it is a MatMul alone.
    """
    heads, groups = rows.dims[-3], shared.dims[-3]
    batch = joint_shape(rows.dims[:-3], shared.dims[:-3])
    shape = (*batch, heads, rows.dims[-2], shared.dims[-1])
    if heads == groups:
        return rows @ shared
    assert isinstance(groups, int)
    assert isinstance(heads, int)
    folded = (*rows.dims[:-3], groups, "rows", rows.dims[-1])
    rows = xp.reshape(rows, [0] * (rows.ndim - 3) + [groups, -1, 0], dims=folded)
    return xp.reshape(rows @ shared, [0] * len(batch) + [heads, -1, 0], dims=shape)


def has_allowed_key(allowed: GraphValue) -> GraphValue:
    """allowed (..., Hq, L, S), any axis of which may be 1 -> boolean (..., Hq, L, 1): may it attend a key.

    Cast -> MatMul with a column of ones -> Greater 0.
    """
    flags = ops.to_rank(allowed, 2).astype("float32")
    shape = (*flags.dims[:-1], 1)
    return allowed.graph.add("MatMul", flags, ops.ones_column(flags), dtype="float32", shape=shape) > 0.0


def is_attended(allowed: GraphValue, groups: int) -> GraphValue:
    """allowed (..., Hq, L, S), any axis of which may be 1 -> boolean (..., H, S, 1): may a query attend it.

    Cast -> ReduceSum over L -> ReduceSum over the heads of a group -> Transpose -> Greater 0.
    """
    count = ops.reduce("ReduceSum", ops.to_rank(allowed, 2).astype("float32"), -2)
    heads = count.dims[-3] if count.ndim >= 3 else 1
    if isinstance(heads, int) and heads not in (1, groups):
        target = [0] * (count.ndim - 3) + [groups, heads // groups, -1]
        count = xp.reshape(count, target, dims=(*count.dims[:-3], groups, heads // groups, count.dims[-1]))
        count = ops.reduce("ReduceSum", count, -2)
    return xp.matrix_transpose(count) > 0.0
