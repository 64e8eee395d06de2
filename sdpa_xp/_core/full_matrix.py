"""The two results of size L x S: the weights of attention, and the scores that they are computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdpa_xp._core.online_softmax import avoid_zero_sum, finite_shift
from sdpa_xp._core.scores import Scores
from sdpa_xp._libraries.protocols import Array, Dtype
from sdpa_xp._tiles.allowed import Allowed
from sdpa_xp._tiles.plan import Plan


def full_weights(scores: Scores, plan: Plan, dtype: Dtype) -> Array:
    """Return the softmax of the scores after dropout, (..., Hq, L, S)."""
    return _concat_rows(scores, [_weights_of_rows(scores, rows) for rows in plan.row_ranges()], dtype)


def full_scores(scores: Scores, plan: Plan, dtype: Dtype) -> Array:
    """Return the scores, (..., Hq, L, S), -inf where a pair may not attend."""
    return _concat_rows(scores, [_scores_of_rows(scores, rows)[0] for rows in plan.row_ranges()], dtype)


def _weights_of_rows(scores: Scores, rows: range) -> Array:
    xp = scores.xp
    s, allowed = _scores_of_rows(scores, rows)
    if 0 in s.shape:  # the maximum of no numbers is an error
        return s
    m = xp.max(s, axis=-1, keepdims=True)
    if scores.sinks is not None:
        m = xp.maximum(m, scores.sinks)
    shift = finite_shift(xp, m)
    p = xp.exp(s - shift)
    l = xp.sum(p, axis=-1, keepdims=True)
    if scores.sinks is not None:
        l = l + xp.exp(scores.sinks - shift)
    w = p / avoid_zero_sum(l)
    if not isinstance(allowed, bool):  # a row with a NaN is NaN everywhere, but a masked pair has weight 0
        w = xp.where(allowed, w, 0.0)
    if scores.dropout is None:
        return w
    return scores.dropout.apply(scores.tile(rows, range(scores.grid.keys)), w)


def _scores_of_rows(scores: Scores, rows: range) -> tuple[Array, Allowed]:
    """Return the scores of one range of queries, (..., Hq, rows, S), and which pairs may attend."""
    xp = scores.xp
    query = scores.scaled_query(rows)
    tile = scores.tile(rows, range(scores.grid.keys))
    allowed = False if 0 in tile.shape else scores.mask.allowed_in(tile)
    if allowed is False:
        return xp.broadcast_to(xp.zeros_like(query[..., :1]) - math.inf, tile.shape), False
    s, allowed = scores.masked(tile, query, allowed)
    return xp.broadcast_to(s, tile.shape), allowed


def _concat_rows(scores: Scores, parts: Sequence[Array], dtype: Dtype) -> Array:
    return scores.xp.concat([scores.xp.astype(part, dtype, copy=False) for part in parts], axis=-2)
