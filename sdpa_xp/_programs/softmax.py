"""The softmax of some queries, one tile of keys after the other.

A row has three sums over its keys: its shift m, l, the sum of exp(score - m), and o, the sum of
exp(score - m) * value. The output is o / l, whatever m is, unless exp overflows or loses digits.

    running shift   m is the largest score so far. A new tile rescales l and o by exp(m_old - m_new).
    fixed shift     m is 0, which saves three passes over a tile; whether digits are lost shows in the result.

Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, algorithm 3;
Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import NamedTuple, cast

from .._libraries import dtype_name
from .._libraries.protocols import Array, Namespace
from .._run import (
    NonfiniteGuard,
    avoid_zero_sum,
    checksum,
    finite_shift,
    has_key,
    matmul_grouped,
    multiply_columns,
    sums_without_keys,
    weigh,
)
from .._run.buffers import CallBuffers, exp_minus, plus, times
from .._tiles import KeyValueSource, is_masked, tuning
from .._tiles.plan import Plan
from . import Scores, rows_within

LEAST_SUM = 2.0**-32
"""Below this sum of a row with m = 0, the exponentials themselves may underflow."""
MOST_UNDERFLOW = {"float32": 2.0**-74, "float64": 2.0**-970}
"""What underflows for a key, over `LEAST_SUM`, times 2^20 keys, times 2^24 or 2^53 for the last digit."""


class RowResult(NamedTuple):
    """The result of a range of queries."""

    output: Array
    m: Array | None
    """The largest score of each row, (..., Hq, rows, 1), -inf in an empty row; None if 0 was used instead."""
    l: Array

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays in which a NaN or inf of the inputs shows."""
        return self.output, self.l

    def named(self, xp: Namespace, name: str) -> Array:
        """Return what a call asks for; the two numbers of "lse_parts" add up to the log-sum-exp.

        One number would lose digits of large scores: all of log(S) if every score of a row is -1e9 in float32.
        """
        if name == "output":
            return self.output
        if name == "checksum":
            return xp.reshape(checksum(xp, self.arrays), (1, 1))
        # Without a maximum, l of an empty row is exactly 0, and its log is -inf.
        log_l = xp.log(self.l if self.m is None else avoid_zero_sum(self.l))
        if name == "lse":
            return self._of_rows(xp, log_l if self.m is None else self.m + log_l)
        parts = (log_l, xp.zeros_like(log_l)) if self.m is None else (self.m, log_l)
        return xp.concat([self._of_rows(xp, part) for part in parts], axis=-1)

    def _of_rows(self, xp: Namespace, column: Array) -> Array:
        """Return a column of the shape of the output, which includes the batch of the values."""
        shape = (*self.output.shape[:-1], 1)
        return column if column.shape == shape else xp.broadcast_to(column, shape) + 0.0


def attend_with_running_shift(
    scores: Scores, value: KeyValueSource, plan: Plan, rows: range, guard: NonfiniteGuard
) -> RowResult:
    """Return the attention of a range of queries, with the largest score of each row as m."""
    query = scores.scaled_query(rows)
    xp, buffers, rules = scores.xp, scores.buffers, scores.tangent_rules
    dropout, sinks = scores.options.dropout, scores.options.sinks
    values, factors = value.factored_slices(scores.grid)
    if guard != "none":  # a guard looks at the values themselves
        values, factors = value.slices(scores.grid), None
    o: Array | None = None
    without_keys = partial(sums_without_keys, xp, query, sinks, scores.leading_shape)
    state = None if sinks is None else without_keys()
    for tile, s, allowed, _ in scores.computed_tiles(rows, plan, query):
        m = xp.max(s, axis=-1, keepdims=True)
        if state is not None:
            m = xp.maximum(state[0], m)
        # The result does not depend on m, and its derivative would be a pass over the tile.
        m = m if rules is None else rules.constant(m)
        shift = finite_shift(xp, m)
        p = exp_minus(buffers, xp, s, shift)
        l = xp.sum(p, axis=-1, keepdims=True)
        # Dropout comes after the sum: the weights are normalised before some are dropped.
        kept = p if dropout is None else dropout.apply(tile, p)
        memory = None if buffers is None or o is None else buffers.product
        if factors is not None:
            kept = multiply_columns(xp, kept, factors(tile.columns), in_place=memory is not None)
        # No name for the values: a copy from a paged cache would live until the next copy has been made.
        of_tile = weigh(xp, kept, values(tile.columns), allowed, guard, memory, rules)
        # The first tile has nothing to rescale: with one tile this is the textbook formula.
        if state is not None:
            rescale = xp.exp(state[0] - shift)
            l = plus(buffers, times(buffers, state[1], rescale), l)
            of_tile = of_tile if o is None else plus(buffers, times(buffers, o, rescale), of_tile)
        state, o = (m, l), of_tile
    m, l = state or without_keys()
    if o is None:
        o = xp.broadcast_to(xp.zeros_like(l), (*l.shape[:-1], value.width))
    return RowResult(o / avoid_zero_sum(l), m, l)


def attend_with_fixed_shift(
    scores: Scores, value: KeyValueSource, plan: Plan, rows: range, out: Array | None
) -> RowResult:
    """Return the attention of a range of queries with m = 0; check the result with `is_accurate`.

    The output is in `out`, zeros, if there is such an array.
    """
    xp, dropout, leading_shape = scores.grid.xp, scores.options.dropout, scores.leading_shape
    l, o = zero_sums(scores, len(rows), value.width, out)
    buffers = cast(CallBuffers, scores.buffers)
    exp, multiply, product = buffers.functions.exp, buffers.functions.multiply, buffers.product
    ones, (values, factors) = buffers.ones(plan.columns), value.factored_slices(scores.grid)
    query = scores.scaled_query(rows)
    for tile, s, allowed, _ in scores.computed_tiles(rows, plan, query, leaves_mask=True):
        p = exp(s, out=s)
        if not isinstance(allowed, bool):
            # Values and mask may have a batch that queries and keys do not have: then the product is larger.
            fits = p.shape[:-2] == leading_shape
            p = multiply(p, allowed, out=p) if fits else p * xp.astype(allowed, p.dtype)
        index = ... if tile.rows == rows else rows_within(tile, rows)
        l[index] += p @ ones[: p.shape[-1], :]  # a product with ones is faster than a sum of rows
        kept = p if dropout is None else dropout.apply(tile, p)
        if factors is not None:
            kept = multiply_columns(xp, kept, factors(tile.columns), in_place=True)
        o[index] += matmul_grouped(xp, kept, values(tile.columns), product)
    o /= avoid_zero_sum(l, LEAST_SUM)
    return RowResult(o, None, l)


def zero_sums(scores: Scores, rows: int, width: int, out: Array | None = None) -> tuple[Array, Array]:
    """Return l and o of rows that have met no key; `out` is an o that is there already."""
    shape, options = (*scores.leading_shape, rows), {"dtype": scores.grid.dtype, "device": scores.grid.device}
    l = scores.xp.zeros((*shape, 1), **options)
    return l, scores.xp.zeros((*shape, width), **options) if out is None else out


def is_accurate(scores: Scores, value: KeyValueSource, plan: Plan, rows: range, result: RowResult) -> bool:
    """Return whether a result is as exact with m = 0 as with the maximum.

    It is if it is finite and no row has a tiny sum. Rows that attend to no key have the sum 0, which is fine.
    With sums from `LEAST_SUM` to 1, products with very small values may underflow, so the values are checked.
    """
    xp, l = scores.xp, result.l
    if not math.isfinite(float(checksum(xp, (result.output,)))):
        return False
    if not float(xp.max(l)) < math.inf:
        return False
    least = float(xp.min(l))
    if least >= 1:
        return True
    if not _are_usual(scores, value, plan, rows):
        return False
    if least >= LEAST_SUM:
        return True
    return scores.options.has_mask and not bool(xp.any(_has_keys(scores, plan, rows) & (l < LEAST_SUM)))


def _are_usual(scores: Scores, value: KeyValueSource, plan: Plan, rows: range) -> bool:
    """Return whether tiny weights keep the digits of all values that the rows may attend.

    What underflows is at most the smallest number for each key, or times the largest value. Divided by a sum of
    `LEAST_SUM` or more, it must stay far below the last digit of the smallest value that is not 0.
    """
    xp, dtype, buffers = scores.xp, scores.grid.dtype, cast(CallBuffers, scores.buffers)
    if not value.width:
        return True
    smallest, largest, values = 1.0, 1.0, value.slices(scores.grid)
    # A tile of few queries has many keys, whose values would make the buffer large.
    keys = max(1, tuning.ONE_CORE.scores // max(1, value.width * math.prod(scores.leading_shape)))
    for columns in replace(plan, columns=min(keys, plan.columns)).column_ranges(scores.key_range(rows)):
        of_tile = values(columns)
        size = buffers.functions.abs(of_tile, out=buffers.product.array(of_tile.shape))
        if math.isnan(most := float(xp.max(size))):
            return False
        least = float(xp.min(size))
        if least == 0:
            least = float(xp.min(xp.where(size <= 0, 1.0, size)))
        largest, smallest = max(largest, most), min(smallest, least)
    return largest * MOST_UNDERFLOW[dtype_name(dtype)] <= smallest


def _has_keys(scores: Scores, plan: Plan, rows: range) -> Array:
    """Return which rows may attend some key, (..., Hq, rows, 1)."""
    xp, grid = scores.xp, scores.grid
    shape = (*scores.leading_shape, len(rows), 1)
    has_keys = xp.zeros(shape, dtype=xp.bool, device=grid.device)
    for tile, allowed in scores.tiles(rows, plan, trims=True):
        index = rows_within(tile, rows)
        if isinstance(allowed, bool):
            has_keys[index] = True
        else:
            has_keys[index] = has_keys[index] | has_key(xp, allowed)
    return has_keys


def merge(xp: Namespace, parts: Sequence[tuple[Array, Array, Array | float]]) -> tuple[Array, Array, Array]:
    """Merge attention over disjoint parts of the keys into attention over all keys.

    Each part has its output and two numbers that add up to its log-sum-exp, of which the second may be 0.
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
