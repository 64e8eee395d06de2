"""Attention tile by tile with the online softmax: memory grows with L + S, never with L * S.

Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, algorithm 3;
Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1. One tile is the textbook formula.

A row is held as m, the largest score so far; l, the sum of exp(score - m); and o, the sum of
exp(score - m) * value. Each new tile rescales l and o by exp(m_old - m_new) and adds its own part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Literal, TypeAlias

from sdpa_xp.biases.algebra import is_masked
from sdpa_xp.masks.algebra import Allowed
from sdpa_xp.namespace import is_traced
from sdpa_xp.protocols import Array, Dtype, Namespace
from sdpa_xp.scores import Scores, attended, matmul_grouped
from sdpa_xp.sources import Source
from sdpa_xp.tiles import Plan

Guard: TypeAlias = Literal["none", "columns", "pairs"]
"""How a NaN or inf in a masked value is kept out, since a weight of zero does not suffice: 0 * NaN is NaN.

"columns" blanks the values that no query of the tile attends: all that a traced graph can afford.
"pairs" tells attended from masked for every single pair, at the price of three more products.
"""


def attend(scores: Scores, value: Source, plan: Plan) -> tuple[Array, Array]:
    """Output (..., Hq, L, Ev) and log-sum-exp (..., Hq, L), both in the accumulation dtype."""
    if scores.pairs.traced:
        return _attend(scores, value, plan, "columns")
    output, lse = _attend(scores, value, plan, "none")
    if is_traced(output):  # by what a function of the caller holds
        return _attend(scores, value, plan, "columns")
    if not scores.unmasked and _any_nonfinite(scores.xp, output, lse):
        return _attend(scores, value, plan, "pairs")
    return output, lse


def weights(scores: Scores, plan: Plan, dtype: Dtype) -> Array:
    """Softmax of the scores, (..., Hq, L, S), after dropout."""
    return _stack(scores, [_weights_of(scores, rows) for rows in plan.row_ranges()], dtype)


def scores_of_all(scores: Scores, plan: Plan, dtype: Dtype) -> Array:
    """The scores themselves, (..., Hq, L, S), -inf where a pair may not attend."""
    parts = [_scores_of(scores, rows)[0] for rows in plan.row_ranges()]
    return _stack(scores, parts, dtype)


def merge(xp: Namespace, parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Output and log-sum-exp over all keys, from those over disjoint parts of them."""
    m = reduce(xp.maximum, (lse for _, lse in parts))
    shift = _finite_shift(xp, m)
    l, o = xp.zeros_like(m), xp.expand_dims(xp.zeros_like(m), axis=-1)
    for output, lse in parts:
        weight = xp.exp(lse - shift)
        weighed = xp.astype(output, m.dtype, copy=False) * xp.expand_dims(weight, axis=-1)
        l = l + weight
        o = o + xp.where(xp.expand_dims(is_masked(lse), axis=-1), 0.0, weighed)
    total = _nonzero_total(xp, l)
    return o / xp.expand_dims(total, axis=-1), m + xp.log(total)


def _attend(scores: Scores, value: Source, plan: Plan, guard: Guard) -> tuple[Array, Array]:
    parts = [_fold(scores, value, plan, rows, guard) for rows in plan.row_ranges()]
    outputs, lses = zip(*parts, strict=True)
    return scores.xp.concat(outputs, axis=-2), scores.xp.concat(lses, axis=-1)


def _fold(scores: Scores, value: Source, plan: Plan, rows: range, guard: Guard) -> tuple[Array, Array]:
    """Output and log-sum-exp of one range of queries."""
    xp = scores.xp
    query = scores.scaled_query(rows)
    m, l, o = _no_key_yet(scores, query, value.width)
    for columns in plan.column_ranges(scores.reach(rows)):
        tile = scores.tile(rows, columns)
        allowed = scores.mask.on(tile)
        if allowed is False:
            continue
        s, allowed = scores.on(tile, query, allowed)
        m_new = xp.maximum(m, xp.max(s, axis=-1, keepdims=True))
        shift = _finite_shift(xp, m_new)
        p = xp.exp(s - shift)
        rescale = xp.exp(m - shift)
        v = xp.astype(value.cut(columns), scores.pairs.dtype, copy=False)
        l = l * rescale + xp.sum(p, axis=-1, keepdims=True)
        kept = p if scores.dropout is None else scores.dropout.apply(tile, p)
        o = o * rescale + _weigh(xp, kept, v, allowed, guard)
        m = m_new
    total = _nonzero_total(xp, l)
    return o / total, (m + xp.log(total))[..., 0]


def _weights_of(scores: Scores, rows: range) -> Array:
    xp = scores.xp
    s, allowed = _scores_of(scores, rows)
    if 0 in s.shape:
        return s
    m = xp.max(s, axis=-1, keepdims=True)
    if scores.sinks is not None:
        m = xp.maximum(m, scores.sinks)
    shift = _finite_shift(xp, m)
    p = xp.exp(s - shift)
    l = xp.sum(p, axis=-1, keepdims=True)
    if scores.sinks is not None:
        l = l + xp.exp(scores.sinks - shift)
    w = p / _nonzero_total(xp, l)
    w = w if isinstance(allowed, bool) else xp.where(allowed, w, 0.0)
    if scores.dropout is None:
        return w
    return scores.dropout.apply(scores.tile(rows, range(scores.pairs.keys)), w)


def _scores_of(scores: Scores, rows: range) -> tuple[Array, Allowed]:
    """All scores of one range of queries, (..., Hq, rows, S), and the pairs that may attend."""
    xp = scores.xp
    query = scores.scaled_query(rows)
    tile = scores.tile(rows, range(scores.pairs.keys))
    allowed = False if 0 in tile.shape else scores.mask.on(tile)
    if allowed is False:
        return xp.broadcast_to(xp.zeros_like(query[..., :1]) - math.inf, tile.shape), False
    s, allowed = scores.on(tile, query, allowed)
    return xp.broadcast_to(s, tile.shape), allowed


def _stack(scores: Scores, parts: Sequence[Array], dtype: Dtype) -> Array:
    return scores.xp.concat([scores.xp.astype(part, dtype, copy=False) for part in parts], axis=-2)


def _no_key_yet(scores: Scores, query: Array, width: int) -> tuple[Array, Array, Array]:
    """m, l and o of rows that have met no key: -inf, 0 and 0, or the sink, 1 and 0.

    They are made from the query, so on its device. m has the batch of the query and grows to that of the
    scores; l and o have the batch of the result.
    """
    xp = scores.xp
    zero = xp.zeros_like(query[..., :1])
    shape = (*scores.pairs.scores[:-2], query.shape[-2])
    l, o = (xp.broadcast_to(zero, (*shape, columns)) for columns in (1, width))
    if scores.sinks is None:
        return zero - math.inf, l, o
    return zero + scores.sinks, xp.where(is_masked(scores.sinks), l, l + 1.0), o


def _finite_shift(xp: Namespace, m: Array) -> Array:
    """m, or 0 where a row has no score above -inf: exp(-inf - -inf) would be NaN.

    Only -inf is replaced: a NaN must stay one, or a row that attends it would pass for an empty row.
    """
    return xp.where(is_masked(m), 0.0, m)


def _nonzero_total(xp: Namespace, l: Array) -> Array:
    """l, or 1 in a row without a key, whose output is then 0 and whose log-sum-exp is -inf."""
    return xp.where(l <= 0.0, 1.0, l)


def _weigh(xp: Namespace, p: Array, value: Array, allowed: Allowed, guard: Guard) -> Array:
    """p @ value over the pairs that may attend."""
    if guard == "none" or isinstance(allowed, bool):
        return matmul_grouped(xp, p, value)
    if guard == "columns":
        return matmul_grouped(xp, p, xp.where(attended(xp, allowed, value.shape[-3]), value, 0.0))
    product = matmul_grouped(xp, p, xp.where(xp.isfinite(value), value, 0.0))
    attends = xp.astype(xp.broadcast_to(allowed, p.shape), p.dtype)
    specials = {math.nan: xp.isnan(value), math.inf: value >= math.inf, -math.inf: value <= -math.inf}
    for special, where in specials.items():
        met = matmul_grouped(xp, attends, xp.astype(where, p.dtype)) > 0.0
        product = xp.where(met, product + special, product)
    return product


def _any_nonfinite(xp: Namespace, output: Array, lse: Array) -> bool:
    """Whether a NaN or inf got in. The lse tells where Ev = 0; its -inf is a row without a key."""
    return not bool(xp.all(xp.isfinite(output))) or bool(xp.any(xp.isnan(lse)))
