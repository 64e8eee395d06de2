"""The two results of size L x S: the weights of attention, and the scores that they are computed from."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from .._libraries.protocols import Array, Dtype, Namespace
from .._tiles.plan import Plan
from .._tiles.tile import Allowed, is_masked
from .scores import Scores
from .softmax import avoid_zero_sum, finite_shift


def full_weights(scores: Scores, plan: Plan, dtype: Dtype) -> Array:
    """Return the softmax of the scores after dropout, (..., Hq, L, S)."""
    return _concat_rows(scores, [_weights_of_rows(scores, rows) for rows in plan.row_ranges()], dtype)


def full_scores(scores: Scores, plan: Plan, dtype: Dtype) -> Array:
    """Return the scores, (..., Hq, L, S), -inf where a pair may not attend."""
    return _concat_rows(scores, [_scores_of_rows(scores, rows)[0] for rows in plan.row_ranges()], dtype)


class RowSums(NamedTuple):
    """The maximum and the sum that normalise the weights of a range of queries, (..., Hq, rows, 1)."""

    m: Array
    """The largest score."""
    l: Array
    """The sum of exp(score - m); 0 if there is no score above -inf."""


def row_sums(scores: Scores, rows: range) -> RowSums:
    """Return the sums of a range of queries over all keys, without the sinks."""
    xp = scores.xp
    s, _ = _scores_of_rows(scores, rows)
    m = xp.max(s, axis=-1, keepdims=True)
    return RowSums(m, xp.sum(xp.exp(s - finite_shift(xp, m)), axis=-1, keepdims=True))


def sums_of_sinks(xp: Namespace, sinks: Array, like: RowSums) -> RowSums:
    """Return the sums of rows that have met nothing but a sink, in the shape of `like`."""
    m = xp.zeros_like(like.m) + sinks
    return RowSums(m, xp.where(is_masked(m), 0.0, xp.zeros_like(m) + 1.0))


def merge_row_sums(xp: Namespace, parts: Sequence[RowSums]) -> RowSums:
    """Return the sums over all keys, from those over disjoint parts of the keys."""
    m = reduce(xp.maximum, (part.m for part in parts))
    shift = finite_shift(xp, m)
    return RowSums(m, reduce(operator.add, (part.l * xp.exp(part.m - shift) for part in parts)))


def weights_of_rows(scores: Scores, rows: range, sums: RowSums) -> Array:
    """Return the weights of a range of queries, after dropout; `sums` may cover more keys than these."""
    xp = scores.xp
    s, allowed = _scores_of_rows(scores, rows)
    return _normalized(scores, rows, xp.exp(s - finite_shift(xp, sums.m)), sums.l, allowed)


def _weights_of_rows(scores: Scores, rows: range) -> Array:
    xp = scores.xp
    s, allowed = _scores_of_rows(scores, rows)
    if 0 in s.shape:  # the maximum of no numbers is an error
        return s
    m = xp.max(s, axis=-1, keepdims=True)
    if scores.options.sinks is not None:
        m = xp.maximum(m, scores.options.sinks)
    shift = finite_shift(xp, m)
    p = xp.exp(s - shift)
    l = xp.sum(p, axis=-1, keepdims=True)
    if scores.options.sinks is not None:
        l = l + xp.exp(scores.options.sinks - shift)
    return _normalized(scores, rows, p, l, allowed)


def _normalized(scores: Scores, rows: range, p: Array, l: Array, allowed: Allowed) -> Array:
    w = p / avoid_zero_sum(l)
    if not isinstance(allowed, bool):  # a row with a NaN is NaN everywhere, but a masked pair has weight 0
        w = scores.xp.where(allowed, w, 0.0)
    if scores.options.dropout is None:
        return w
    return scores.options.dropout.apply(scores.tile(rows, scores.grid.sides[1]), w)


def _scores_of_rows(scores: Scores, rows: range) -> tuple[Array, Allowed]:
    """Return the scores of one range of queries, (..., Hq, rows, S), and which pairs may attend."""
    xp, keys, query = scores.xp, scores.grid.sides[1], scores.scaled_query(rows)
    shape = scores.tile(rows, keys).shape
    whole_rows = Plan(rows.stop, keys.stop, len(rows), max(1, keys.stop), 0 in shape).with_common_borders()
    for _, s, allowed, _ in scores.computed_tiles(rows, whole_rows, query):  # one tile, or none
        return xp.broadcast_to(s, shape), allowed
    return xp.broadcast_to(xp.zeros_like(query[..., :1]) - math.inf, shape), False


def _concat_rows(scores: Scores, parts: Sequence[Array], dtype: Dtype) -> Array:
    return scores.xp.concat([scores.xp.astype(part, dtype, copy=False) for part in parts], axis=-2)
