"""Attention of a tile in the operators of ai.onnx: what every form without a fused kernel is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdpa_xp.masks import Mask
from sdpa_xp_export._array_api import namespace as xp
from sdpa_xp_export._array_api import ops
from sdpa_xp_export._call.mask_analysis import has_empty_rows, hides_keys, only_causal
from sdpa_xp_export._call.operands import Initializer, Input
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.lowering import heads
from sdpa_xp_export.lowering.biases import add_biases
from sdpa_xp_export.lowering.masks import AllowedPairs, allowed_pairs, both_allow
from sdpa_xp_export.lowering.tile import GraphTile


def scale_query(tile: GraphTile, query: GraphValue) -> GraphValue:
    """query -> query * scale, over the soft cap for the Tanh of the scores."""
    call = tile.call
    if isinstance(call.scale, Input | Initializer):
        query = query * tile.operand(call.scale).astype(query.dtype)
        return query if call.softcap is None else query / call.softcap
    return query * (call.scale / (call.softcap or 1.0))


def attend_tile(
    tile: GraphTile, query: GraphValue, key: GraphValue, value: GraphValue, *, sums: bool = False
) -> dict[str, GraphValue]:
    """A `scaled` query, key and value of the tile -> what the call asks for, by name.

    A row without a key comes out of Softmax as NaN; the Where at the end makes it 0. With `sums` there is no
    Softmax, but its sum is written out, which is 0 for such a row.
    """
    call = tile.call
    scores, may = masked_scores(tile, query, key)
    scores = scores if call.outputs == ("output",) else _of_each_entry(tile, scores)
    sums = sums or call.sinks is not None or "lse" in call.outputs
    weights, lse = _explicit_softmax(tile, scores) if sums else (_softmax(scores), None)
    if isinstance(may, GraphValue) and hides_keys(call):
        value = xp.where(heads.is_attended(may, int(value.shape[-3])), value, 0.0)
    made = {"output": heads.matmul_grouped(weights, value), "weights": weights, "scores": scores}
    if lse is not None:
        made["lse"] = lse
    if not sums and isinstance(may, GraphValue) and has_empty_rows(call):
        attends = heads.has_allowed_key(may)
        kept = {name: xp.where(attends, made[name], 0.0) for name in call.outputs if name != "scores"}
        made |= kept
    return made


def masked_scores(tile: GraphTile, query: GraphValue, key: GraphValue) -> tuple[GraphValue, AllowedPairs]:
    """query, key -> query @ key^T -> Tanh, Mul softcap -> biases -> Where(may attend, scores, -inf)."""
    call = tile.call
    scores = heads.matmul_grouped(query, ops.transpose(key))
    if call.softcap is not None:
        scores = xp.tanh(scores) * call.softcap
    scores, may = add_biases(call.biases, tile, scores, all_allowed(tile, call.masks))
    if isinstance(may, bool):
        return scores, may
    if only_causal(call) and not hides_keys(call):  # one small array for all heads
        return scores + xp.where(may, tile.graph.constant(0.0, scores.dtype), -math.inf), may
    return xp.where(may, scores, -math.inf), may


def _of_each_entry(tile: GraphTile, scores: GraphValue) -> GraphValue:
    """scores -> Expand to the whole batch, of which the values alone may have an axis."""
    batch = tile.call.sizes.batch
    if scores.shape[:-3] == batch:
        return scores
    lengths = [tile.here(tile.pairs.length(length)) for length in batch]
    target = ops.join([*lengths, *[tile.graph.constant([1], "int64")] * 3])
    return ops.expand(scores, target, (*batch, *scores.shape[-3:]))


def all_allowed(tile: GraphTile, masks: Sequence[Mask]) -> AllowedPairs:
    """masks -> And of what they let attend, and of what is real in a padded cache."""
    may: AllowedPairs = True
    for mask in masks:
        may = both_allow(may, allowed_pairs(mask, tile))
    if tile.pairs.filled is not None:
        may = both_allow(may, tile.key_index < tile.here(tile.pairs.filled))
    return tile.graph.constant(False, "bool") if may is False else may


def _softmax(scores: GraphValue) -> GraphValue:
    return scores.graph.add("Softmax", scores, dtype=scores.dtype, shape=scores.shape, axis=-1)


def _explicit_softmax(tile: GraphTile, scores: GraphValue) -> tuple[GraphValue, GraphValue | None]:
    """scores -> exp(s - m) / l and, if the call asks for it, m + log(l), where the sinks count in m and l.

    Where l is 0, both are written out: WebGPU leaves log(0) open, and a software adapter gives -88.
    """
    call = tile.call
    m = ops.reduce("ReduceMax", scores)
    sinks = None
    if call.sinks is not None:
        sinks = tile.operand(call.sinks).astype(scores.dtype)
        shape = sinks.shape
        sinks = ops.reshape(sinks, (*[0] * len(shape), 1, 1), (*shape, 1, 1))
        m = xp.maximum(m, sinks)
    shift = xp.where(xp.is_masked(m), 0.0, m)
    p = xp.exp(scores - shift)
    l = ops.reduce("ReduceSum", p)
    if sinks is not None:
        l = l + xp.exp(sinks - shift)
    empty = l <= 0.0
    l = xp.where(empty, 1.0, l)
    weights = p / l
    if "lse" not in call.outputs:
        return weights, None
    lse = xp.where(empty, -math.inf, xp.log(l) + shift)
    axis = lse.graph.constant([-1], "int64")
    return weights, lse.graph.add("Squeeze", lse, axis, dtype=lse.dtype, shape=lse.shape[:-1])
