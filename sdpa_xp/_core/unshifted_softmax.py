"""The softmax without a maximum: exp(score) instead of exp(score - m), which saves three passes over a tile.

The weights of a row are the same for every m, unless exp overflows, or so much of a row underflows that digits
are lost. Both show in the results, which are checked afterwards.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

from sdpa_xp._core.key_value_source import KeyValueSource
from sdpa_xp._core.online_softmax import RowResult, avoid_zero_sum
from sdpa_xp._core.products import matmul_grouped
from sdpa_xp._core.scores import Scores
from sdpa_xp._core.tile_buffers import CallBuffers
from sdpa_xp._libraries import exp_in_place
from sdpa_xp._libraries.dtypes import astype_if_needed, dtype_name
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.plan import ONE_CORE, Plan
from sdpa_xp._tiles.tile import Tile

LEAST_SUM = 2.0**-32
"""Below this sum of a row, the exponentials themselves may underflow."""
MOST_UNDERFLOW = {"float32": 2.0**-74, "float64": 2.0**-970}
"""What underflows for a key, over `LEAST_SUM`, times 2^20 keys, times 2^24 or 2^53 for the last digit."""


def attend_without_maximum(
    scores: Scores, query: Array, value: KeyValueSource, plan: Plan, rows: range, out: Array | None
) -> RowResult:
    """Return the attention of a `scaled_query` with m = 0; check the result with `is_accurate`."""
    xp, grid, leading_shape = scores.xp, scores.grid, scores.leading_shape
    buffers, options = cast(CallBuffers, scores.buffers), {"dtype": grid.dtype, "device": grid.device}
    l = xp.zeros((*leading_shape, len(rows), 1), **options)
    o = xp.zeros((*leading_shape, len(rows), value.width), **options) if out is None else out
    ones = xp.full((plan.columns, 1), 1.0, **options)
    for tile, allowed in scores.trimmed_tiles(rows, plan):
        index = _rows_of(tile, rows)
        s, _ = scores.masked(tile, query[index], True)
        p = exp_in_place(buffers.functions, s)
        if not isinstance(allowed, bool):
            # Values and mask may have a batch that queries and keys do not have: then the product is larger.
            fits = p.shape[:-2] == leading_shape
            p = buffers.functions.multiply(p, allowed, out=p) if fits else p * xp.astype(allowed, p.dtype)
        l[index] += p @ ones[: len(tile.columns), :]  # a product with ones is faster than a sum of rows
        kept = p if scores.options.dropout is None else scores.options.dropout.apply(tile, p)
        # No name for the values: a copy from a paged cache would live until the next copy has been made.
        o[index] += matmul_grouped(
            xp, kept, astype_if_needed(xp, value.slice_keys(tile.columns), grid.dtype), buffers.product
        )
    o /= avoid_zero_sum(l, LEAST_SUM)
    return RowResult(o, None, l)


def is_accurate(scores: Scores, value: KeyValueSource, plan: Plan, rows: range, result: RowResult) -> bool:
    """Return whether a result is as exact without a maximum as with it.

    It is if it is finite and no row has a tiny sum. Rows that attend to no key have the sum 0, which is fine.
    With sums from `LEAST_SUM` to 1, products with very small values may underflow, so the values are checked.
    """
    xp, l = scores.xp, result.l
    if not math.isfinite(float(xp.sum(result.output))) or not float(xp.max(l)) < math.inf:
        return False
    least = float(xp.min(l))
    if least >= 1:
        return True
    if not _are_usual(scores, value, plan, rows):
        return False
    if least >= LEAST_SUM:
        return True
    return not scores.options.is_unmasked and not bool(xp.any(_has_keys(scores, plan, rows) & (l < LEAST_SUM)))


def _are_usual(scores: Scores, value: KeyValueSource, plan: Plan, rows: range) -> bool:
    """Return whether tiny weights keep the digits of all values that the rows may attend.

    What underflows is at most the smallest number for each key, or times the largest value. Divided by a sum of
    `LEAST_SUM` or more, it must stay far below the last digit of the smallest value that is not 0.
    """
    xp, dtype, buffers = scores.xp, scores.grid.dtype, cast(CallBuffers, scores.buffers)
    if not value.width:
        return True
    smallest, largest = 1.0, 1.0
    key_range = range(plan.keys) if scores.options.is_unmasked else scores.key_range(rows)
    # A tile of few queries has many keys, whose values would make the buffer large.
    keys = max(1, ONE_CORE.scores // max(1, value.width * math.prod(scores.leading_shape)))
    for columns in replace(plan, columns=min(keys, plan.columns)).column_ranges(key_range):
        values = astype_if_needed(xp, value.slice_keys(columns), dtype)
        size = buffers.functions.abs(values, out=buffers.product.array(values.shape))
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
    for tile, allowed in scores.trimmed_tiles(rows, plan):
        index = _rows_of(tile, rows)
        if isinstance(allowed, bool):
            has_keys[index] = True
        else:
            has_keys[index] = has_keys[index] | xp.any(allowed, axis=-1, keepdims=True)
    return has_keys


def _rows_of(tile: Tile, rows: range) -> tuple[object, ...]:
    """Return the index of the tile's queries among `rows`, in an array (..., rows, width)."""
    return (..., slice(tile.rows.start - rows.start, tile.rows.stop - rows.start), slice(None))
