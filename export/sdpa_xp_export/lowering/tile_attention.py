"""Attention of a tile in the operators of ai.onnx, used by every form without a fused kernel."""

from __future__ import annotations

import math

from sdpa_xp._checks.arrays import HLE

from .. import _arrays as xp
from .._arrays import ops
from .._call.mask_analysis import has_empty_rows, is_only_causal
from .._call.operands import Initializer, Input
from .._call.outputs import SUMS_OF_QUERIES
from .._graph import GraphValue
from .._runtime.releases import Runtime
from . import statistics
from .formula import AllowedPairs, all_allowed, biased, both_allow
from .tile import GraphTile

EXPLICIT = {"lse", "row_max", "entropy", "top_weights", "top_indices", *SUMS_OF_QUERIES}
"""What a Softmax does not return; the largest score must not lose a NaN to what is added to hide a pair."""


def scale_query(tile: GraphTile, query: GraphValue) -> GraphValue:
    """query of the tile -> query * scale, also divided by the softcap, whose Tanh takes scores / softcap."""
    call = tile.call
    if isinstance(call.scale, Input | Initializer):
        query = query * tile.cut(tile.operand(call.scale)).astype(query.elem_type)
        return query if call.softcap is None else query / call.softcap
    return query * (call.scale / (call.softcap or 1.0))


def attend_tile(
    tile: GraphTile, query: GraphValue, key: GraphValue, value: GraphValue, runtime: Runtime
) -> dict[str, GraphValue]:
    """query from `scale_query`, key, value -> the outputs of the call and others, by name.

    Exponentials and their sum are written instead of a Softmax where that has no room for sinks, returns no
    log-sum-exp, or hides NaN, which would hide it in a row that attends it, too.
    """
    call = tile.call
    explicit_softmax = (
        runtime.softmax_hides_nan or call.sinks is not None or not EXPLICIT.isdisjoint(call.outputs)
    )
    if runtime.exp_hides_nan:  # in its Softmax, too, if that is not one kernel with the products
        explicit_softmax = explicit_softmax or call.outputs != ("output",)
    # A query that is inf or NaN makes the scores of masked keys NaN. A Softmax node returns NaN for its row in
    # any case, unless the row has no key; but a soft cap and an explicit softmax may return numbers.
    may_add = not explicit_softmax and call.softcap is None
    scores, allowed = masked_scores(tile, query, key, may_add=may_add)
    # Weights and scores have the whole batch, of which the values alone may have an axis.
    scores = scores if call.outputs == ("output",) else _expand_to_batch(tile, scores)
    results = {"scores": scores}
    if explicit_softmax:
        weights, of_rows = _explicit_softmax(tile, scores, runtime)
        results |= of_rows
    else:
        weights = scores.graph.add("Softmax", scores, dtype=scores.elem_type, shape=scores.dims, axis=-1)
    results["weights"] = weights
    if call.sums_queries:
        results |= statistics.sums_of_weights(tile, weights)
    if isinstance(allowed, GraphValue) and tile.hides_keys:
        # The weight of a masked pair is 0, but 0 * NaN is NaN: what no query attends becomes 0 first.
        value = xp.where(is_attended(allowed, call.sizes.heads), value, 0.0)
    results["output"] = matmul_grouped(weights, value, tile.folds)
    if not explicit_softmax and isinstance(allowed, GraphValue) and has_empty_rows(call):
        # Softmax returns NaN for a row without a key. The explicit softmax divides by 1 there, and returns 0.
        attends = has_allowed_key(allowed)
        results |= {name: xp.where(attends, results[name], 0.0) for name in call.outputs if name != "scores"}
    return results


def masked_scores(
    tile: GraphTile, query: GraphValue, key: GraphValue, *, may_add: bool = True
) -> tuple[GraphValue, AllowedPairs]:
    """query, key -> query @ key^T -> Tanh, Mul softcap -> biases -> Where(may attend, scores, -inf).

    With `may_add`, the -inf of a `key_mask` is added, which is faster than a Where but leaves NaN what is NaN.
    """
    call = tile.call
    scores = matmul_grouped(query, xp.matrix_transpose(key), tile.folds)
    if call.softcap is not None:
        scores = xp.tanh(scores) * call.softcap
    scores, allowed = biased(tile, scores, all_allowed(tile, tile.masks))
    if tile.key_mask is not None and not may_add:
        allowed = both_allow(allowed, tile.key_mask.allowed)
        assert isinstance(allowed, GraphValue)
        return xp.where(allowed, scores, -math.inf), allowed
    hidden = None if tile.key_mask is None else tile.key_mask.added
    if isinstance(allowed, GraphValue):
        if tile.hides_keys or not is_only_causal(tile.masks, call.biases):
            scores = xp.where(allowed, scores, -math.inf)
        else:
            # Some query attends each key that is left, so -inf may be added: one small array serves all heads.
            masked = xp.where(allowed, tile.graph.constant(0.0, scores.elem_type), -math.inf)
            hidden = masked if hidden is None else masked + hidden
    if tile.key_mask is not None:
        allowed = both_allow(allowed, tile.key_mask.allowed)
    return (scores if hidden is None else scores + hidden), allowed


def _expand_to_batch(tile: GraphTile, scores: GraphValue) -> GraphValue:
    """scores -> Expand to the whole batch."""
    batch = tile.call.sizes.batch
    if scores.dims[:-3] == batch:
        return scores
    lengths = tile.whole.lengths
    ones = [lengths.graph.constant([1], "int64")] * 3
    target = tile.here(xp.concat([*(lengths.length(length) for length in batch), *ones]))
    return xp.broadcast_to(scores, target, dims=(*batch, *scores.dims[-3:]))


def _explicit_softmax(
    tile: GraphTile, scores: GraphValue, runtime: Runtime
) -> tuple[GraphValue, dict[str, GraphValue]]:
    """scores -> exp(s - m) / l, and what a call may ask for of each row.

    The log-sum-exp is m + log(l); sinks count in m and in l, but not in the largest score.
    """
    call = tile.call
    asks = "row_max" in call.outputs
    m = statistics.row_max(scores, runtime) if asks else ops.reduce("ReduceMax", scores)
    of_rows, sinks = {"row_max": m}, None
    if call.sinks is not None:
        sinks = ops.with_ones(tile.operand(call.sinks).astype(scores.elem_type), 2)
        m = xp.maximum(m, sinks)
    shift = xp.where(xp.is_masked(m), 0.0, m)  # -inf - -inf would be NaN
    difference = scores - shift
    p = xp.exp(difference)
    if runtime.exp_hides_nan:
        p = xp.where(xp.isnan(scores), scores, p)
    l = of_keys = ops.reduce("ReduceSum", p)
    if sinks is not None:
        l = l + xp.exp(sinks - shift)
    empty = l <= 0.0  # all scores of the row are -inf, and so is its sink if there is one
    l = xp.where(empty, 1.0, l)
    # -inf is written for empty rows: WebGPU leaves log(0) open, and a software adapter returns -88.
    of_rows["lse"] = xp.where(empty, -math.inf, xp.log(l) + shift)
    of_rows["entropy"] = statistics.entropy(p, difference, of_keys, l)
    of_rows = {name: _without_last_axis(value) for name, value in of_rows.items()}
    if call.top_k:
        of_rows["top_weights"], of_rows["top_indices"] = statistics.top_keys(tile, scores, shift, l)
    return p / l, of_rows


def _without_last_axis(value: GraphValue) -> GraphValue:
    axis = value.graph.constant([-1], "int64")
    return value.graph.add("Squeeze", value, axis, dtype=value.elem_type, shape=value.dims[:-1])


def in_layout(value: GraphValue, layout: str) -> GraphValue:
    """(..., heads, length, width) -> the axes in the order of `layout`, and back; 2-D has no heads."""
    return value if layout == HLE or value.ndim < 3 else xp.moveaxis(value, -2, -3)


def matmul_grouped(
    rows: GraphValue, shared: GraphValue, folds: tuple[GraphValue, GraphValue] | None
) -> GraphValue:
    """rows (..., Hq, L, X), shared (..., H, X, Y) -> (..., Hq, L, Y); head h meets shared head h // G.

    The G = Hq // H heads of a group become rows of one product, so `shared` is never repeated:
    Reshape -> MatMul -> Reshape. With Hq = H it is a MatMul alone. `folds` has the shapes of the two Reshapes,
    (..., H, -1, X) and (..., Hq, -1, Y), if only a run says H.
    """
    heads, groups = rows.dims[-3], shared.dims[-3]
    batch = rows.graph.joint_shape(rows.dims[:-3], shared.dims[:-3])
    shape = (*batch, heads, rows.dims[-2], shared.dims[-1])
    if heads == groups:
        return rows @ shared
    folded = (*rows.dims[:-3], groups, "folded rows", rows.dims[-1])
    to_groups, to_heads = folds or (
        [*[0] * len(before), count, -1, 0] for before, count in ((rows.dims[:-3], groups), (batch, heads))
    )
    return xp.reshape(xp.reshape(rows, to_groups, dims=folded) @ shared, to_heads, dims=shape)


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
