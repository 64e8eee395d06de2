"""The online softmax: attention of some queries, one tile of keys after the other.

Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, algorithm 3;
Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1.

The state of a row is m, the largest score so far; l, the sum of exp(score - m); and o, the sum of
exp(score - m) * value. Each new tile rescales l and o by exp(m_old - m_new) and adds its own part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from sdpa_xp._core.key_value_source import KeyValueSource
from sdpa_xp._core.nonfinite import NonfiniteGuard, weigh
from sdpa_xp._core.scores import Scores
from sdpa_xp._libraries import exp_in_place
from sdpa_xp._libraries.dtypes import astype_if_needed
from sdpa_xp._libraries.protocols import Array, Namespace
from sdpa_xp._tiles.allowed import is_masked
from sdpa_xp._tiles.plan import Plan


class RowResult(NamedTuple):
    """The result of a range of queries."""

    output: Array
    m: Array | None
    """The largest score of each row, (..., Hq, rows, 1), -inf in an empty row; None if 0 was used instead."""
    l: Array

    def lse(self, xp: Namespace) -> Array:
        """Return the log-sum-exp, (..., Hq, rows, 1)."""
        # Without a maximum, l of an empty row is exactly 0, and its log is -inf.
        lse = xp.log(self.l) if self.m is None else self.m + xp.log(avoid_zero_sum(self.l))
        return self._of_rows(xp, lse)

    def lse_parts(self, xp: Namespace) -> Array:
        """Return two numbers that add up to the log-sum-exp, (..., Hq, rows, 2).

        One number would lose digits of large scores: all of log(S) if every score of a row is -1e9 in float32.
        """
        if self.m is None:
            parts = [xp.log(self.l), xp.zeros_like(self.l)]
        else:
            parts = [self.m, xp.log(avoid_zero_sum(self.l))]
        return xp.concat([self._of_rows(xp, part) for part in parts], axis=-1)

    def _of_rows(self, xp: Namespace, column: Array) -> Array:
        """Return a column of the shape of the output, which includes the batch of the values."""
        shape = (*self.output.shape[:-1], 1)
        return column if column.shape == shape else xp.broadcast_to(column, shape) + 0.0


def attend_with_maximum(
    scores: Scores, query: Array, value: KeyValueSource, plan: Plan, rows: range, guard: NonfiniteGuard
) -> RowResult:
    """Return the attention of a `scaled_query`, with the largest score of each row as m."""
    xp = scores.xp
    state = None if scores.options.sinks is None else _state_without_keys(scores, query)
    for tile, allowed in scores.tiles(rows, plan):
        s, allowed = scores.masked(tile, query, allowed)
        m_new = xp.max(s, axis=-1, keepdims=True)
        if state is not None:
            m_new = xp.maximum(state[0], m_new)
        shift = finite_shift(xp, m_new)
        p = _exp(scores, s, shift)
        l_new = xp.sum(p, axis=-1, keepdims=True)
        # Dropout comes after the sum: the weights are normalised before some are dropped.
        kept = p if scores.options.dropout is None else scores.options.dropout.apply(tile, p)
        v = astype_if_needed(xp, value.slice_keys(tile.columns), scores.grid.dtype)
        # The first tile has nothing to rescale: with one tile this is the textbook formula.
        if state is None:
            state = m_new, l_new, weigh(xp, kept, v, allowed, guard)
            continue
        m, l, o = state
        rescale = xp.exp(m - shift)
        if o is None:
            o = weigh(xp, kept, v, allowed, guard)
        elif scores.buffers is None:
            o = o * rescale + weigh(xp, kept, v, allowed, guard)
        else:
            o *= rescale
            o += weigh(xp, kept, v, allowed, guard, scores.buffers.product)
        state = m_new, l * rescale + l_new, o
    m, l, o = state or _state_without_keys(scores, query)
    if o is None:
        o = xp.broadcast_to(xp.zeros_like(l), (*l.shape[:-1], value.width))
    return RowResult(o / avoid_zero_sum(l), m, l)


def merge(xp: Namespace, parts: Sequence[tuple[Array, Array, Array | float]]) -> tuple[Array, Array, Array]:
    """Merge attention over disjoint parts of the keys into attention over all keys.

    Each part has its output and the two numbers of `RowResult.lse_parts`. The second number may be 0.
    """
    m = reduce(xp.maximum, (large for _, large, _ in parts))
    shift = finite_shift(xp, m)
    l, o = xp.zeros_like(m), xp.expand_dims(xp.zeros_like(m), axis=-1)
    for output, large, small in parts:
        weight = xp.exp(large - shift + small)
        weighed = xp.astype(output, m.dtype, copy=False) * xp.expand_dims(weight, axis=-1)
        l = l + weight
        # A part without keys has weight 0, but its output might be NaN.
        o = o + xp.where(xp.expand_dims(is_masked(large), axis=-1), 0.0, weighed)
    total = avoid_zero_sum(l)
    return o / xp.expand_dims(total, axis=-1), m, xp.log(total)


def finite_shift(xp: Namespace, m: Array) -> Array:
    """Return m, or 0 in a row without a score above -inf, because exp(-inf - -inf) is NaN.

    Only -inf is replaced: a NaN must stay one, or a row that attends it would pass for an empty row.
    """
    return xp.where(is_masked(m), 0.0, m)


def avoid_zero_sum(l: Array, least: float = 1.0) -> Array:
    """Return l, or a tiny number in a row without a key, whose output is then 0 and whose log-sum-exp is -inf.

    The sums of other rows are `least` or more (1 with a maximum), and do not change: the tiny number is less
    than half of their last bit in float64. With a maximum its square is not 0 in float32, so that autograd does
    not compute 0 / 0; without one nothing is differentiated.
    """
    return l + least * 2.0**-55


def _exp(scores: Scores, s: Array, shift: Array) -> Array:
    """Return exp(s - shift), in the memory of s if nothing else can hold that array."""
    if scores.buffers is None or s.shape[:-1] != shift.shape[:-1]:
        return scores.xp.exp(s - shift)
    s -= shift
    return exp_in_place(scores.buffers.functions, s)


def _state_without_keys(scores: Scores, query: Array) -> tuple[Array, Array, Array | None]:
    """Return m, l and o of rows that have met no key: -inf and 0, or sink and 1. None is an o of 0."""
    xp, sinks = scores.xp, scores.options.sinks
    zero = xp.zeros_like(query[..., :1])  # on the device of the query
    l = xp.broadcast_to(zero, (*scores.leading_shape, query.shape[-2], 1))
    if sinks is None:
        return zero - math.inf, l, None
    return zero + sinks, xp.where(is_masked(sinks), l, l + 1.0), None
