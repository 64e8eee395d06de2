"""Attention whose bits do not depend on the other queries, on the batch, on padding or on how the keys are cut.

The sums of a row are those of tiles of keys, added in the order of the keys. The tiles count from the first key
that the row may attend to, so that padding, or another text, in front of it changes nothing. A tile where the
row may attend to no key adds 0, so it may be left out. The shift m is 0 if that keeps all digits of the row,
and else its largest score; neither depends on the order of the keys. He et al., "Defeating Nondeterminism in
LLM Inference", Thinking Machines Lab, 2025, call this batch-invariant.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, product
from operator import itemgetter

from .._libraries import dtype_name
from .._libraries.protocols import Array
from .._run import NonfiniteGuard, avoid_zero_sum, finite_shift, is_finite, weigh
from .._tiles import KeyValueSource, LeadingSlice
from .._tiles.plan import Plan, Task
from .._tiles.tuning import KEYS_OF_A_PRODUCT as KEYS
from .._tiles.tuning import ROWS_OF_A_PRODUCT as ROWS
from . import Scores, rows_within
from .fixed_blocks import add_weighted
from .softmax import LEAST_SUM, RowResult, zero_sums

LEAST_OUTPUT = {"float32": 2.0**-74, "float64": 2.0**-900}
"""Sums over values that have kept their digits, whatever underflows for 2^20 keys, if those of weights are at
least `LEAST_SUM`."""
LEAST_BIAS = -(2.0**15)
"""A pair with a smaller bias has weight 0, unless all pairs of its row have. It counts as padding, since many
masks have `finfo.min` in place of -inf, in float16, too."""


def aligned(scores: Scores, plan: Plan) -> Plan:
    """Return a plan with tasks cut so that the first keys of the queries of each lie at one place of a tile.

    Most calls need no cut: their queries may attend to key 0. A sliding window cuts out each query. With tasks
    of its own, a small call is computed as a large one is.
    """
    if not scores.options.may_mask or 0 in scores.grid.shape:
        return replace(plan, own_tasks=tuple(plan.tasks()))
    tasks, slices = list[Task](), plan.leading_slices or (None,)
    # Biases are asked with an array of the size of a tile.
    of_all: tuple[LeadingSlice | None, ...] = slices if scores.options.biases else (None,)
    for rows, leading in product([*plan.row_ranges()][::-1], of_all):
        part = scores.slice_leading(leading)
        places = _first_keys(part, plan, rows) % KEYS
        table = scores.grid.library.to_list(scores.xp.reshape(places, (-1, len(rows))))
        is_shared, ranges = table.count(table[0]) == len(table), leading or map(range, part.leading_shape)
        axes = [
            [axis] if is_shared or count == 1 else [range(n, n + 1) for n in axis]
            for axis, count in zip(ranges, places.shape, strict=False)
        ]
        for entries, of_rows in zip(product(*axes), table, strict=not is_shared):
            for place, run in groupby(zip(of_rows, rows, strict=True), itemgetter(0)):
                numbers = [row for _, row in run]
                cut = range(numbers[0], numbers[-1] + 1)
                # A few rows of all heads fit into a tile, and each task takes some time to begin.
                is_large = is_shared and leading is None and len(cut) > ROWS
                of_task = replace(plan, first_key=place)
                tasks += [Task((x,), (cut,), of_task) for x in (slices if is_large else (entries,))]
    return replace(plan, own_tasks=tuple(tasks))


def _first_keys(scores: Scores, plan: Plan, rows: range) -> Array:
    """Return the first key of each query, (..., Hq, rows), also with axes of 1; 0 if it may attend to none."""
    xp, grid, none = scores.xp, scores.grid, scores.grid.keys
    first = xp.full((*[1] * len(scores.leading_shape), len(rows)), none, dtype=xp.int64, device=None)
    # Key 0 is the first one of most queries, and a tile of it alone tells.
    for columns in (range(1), *plan.column_ranges(scores.key_range(rows))):
        tile = scores.tile(rows, columns)
        allowed = scores.options.mask.allowed_in(tile)
        if scores.options.biases and allowed is not False:
            zeros = xp.zeros(tile.shape, dtype=grid.dtype, device=None)
            allowed = scores.with_biases(tile, zeros, allowed)[0] > LEAST_BIAS
        if isinstance(allowed, bool):
            allowed = xp.asarray([[allowed]], dtype=xp.bool, device=None)
        place = columns.start + xp.argmax(xp.astype(allowed, xp.int8), axis=-1)
        first = xp.where((first < none) | ~xp.any(allowed, axis=-1), first, place)
        if int(xp.max(first)) < none:
            break
    return xp.where(first < none, first, 0)


def attend_rows(
    scores: Scores, value: KeyValueSource, plan: Plan, rows: range, _guard: NonfiniteGuard
) -> RowResult:
    """Return the attention of one range of queries. Its guard does not depend on the kind of the values."""
    xp = scores.xp
    l, o = _sums(scores, value, plan, rows, None, is_guarded=False)
    if 0 not in l.shape and float(xp.min(l)) >= 1 and is_finite(xp, (l, o)):  # most calls: all rows are exact
        return RowResult(o / avoid_zero_sum(l), None, l)
    m = xp.zeros_like(l)
    # The choice is made for each row by its own sums, so that it does not depend on the others.
    is_small = xp.any(xp.abs(o) < LEAST_OUTPUT[dtype_name(o.dtype)], axis=-1, keepdims=True)
    is_exact = xp.isfinite(l) & xp.isfinite(xp.sum(o, axis=-1, keepdims=True))
    is_exact = is_exact & ((l >= 1) | ((l >= LEAST_SUM) & ~is_small))
    if not bool(xp.all(is_exact)):
        m = xp.where(is_exact, 0.0, _largest_scores(scores, plan, rows))
        shifted = _sums(scores, value, plan, rows, finite_shift(xp, m), is_guarded=False)
        l, o = (xp.where(is_exact, *pair) for pair in zip((l, o), shifted, strict=True))
    output = o / avoid_zero_sum(l, LEAST_SUM)
    # `RowResult` expects sums of at least 1.
    return RowResult(output, xp.where(l > 0, m + xp.log(l), m), xp.where(l > 0, 1.0, l))


def _largest_scores(scores: Scores, plan: Plan, rows: range) -> Array:
    """Return the largest score of each row, (..., Hq, rows, 1), -inf in a row without keys."""
    xp, sinks = scores.xp, scores.options.sinks
    l, _ = zero_sums(scores, len(rows), 0)
    m = l - float("inf") if sinks is None else l + sinks
    for computed in scores.computed_tiles(rows, plan, scores.scaled_query(rows)):
        m = xp.maximum(m, xp.max(computed.scores, axis=-1, keepdims=True))
    return m


def _sums(
    scores: Scores, value: KeyValueSource, plan: Plan, rows: range, shift: Array | None, *, is_guarded: bool
) -> tuple[Array, Array]:
    """Return l and o of each row. With a guard, NaN and inf in a value show only in rows that attend to it.

    Sums that are not finite are computed a second time, guarded.
    """
    xp, buffers, sinks, values = scores.xp, scores.buffers, scores.options.sinks, value.slices(scores.grid)
    query = scores.scaled_query(rows)
    l, o = zero_sums(scores, len(rows), value.width)
    if sinks is not None:
        l += xp.exp(sinks if shift is None else sinks - shift)
    # The guard asks which pairs the biases mask, too.
    for tile, s, allowed, _ in scores.computed_tiles(rows, plan, query, leaves_mask=not is_guarded):
        index = rows_within(tile, rows)
        if shift is not None:
            s = s - shift[index]  # not in place: the values may have a batch that the scores lack
        p, of_tile = xp.exp(s) if buffers is None else buffers.functions.exp(s, out=s), values(tile.columns)
        if is_guarded:
            # Also if all pairs may attend: inf times a weight that underflows must be the same with a mask.
            pairs = xp.asarray([[True]], dtype=xp.bool, device=None) if isinstance(allowed, bool) else allowed
            o[index] += weigh(xp, xp.zeros_like(p), of_tile, pairs, "pairs")
            of_tile = xp.where(xp.isfinite(of_tile), of_tile, 0.0)
        elif not isinstance(allowed, bool):
            if buffers is not None and p.shape[:-2] == scores.leading_shape:
                p = buffers.functions.multiply(p, allowed, out=p)
            else:
                p = p * xp.astype(allowed, p.dtype)
        # A sum or a product may get the order in memory of a mask or a bias with more batch entries.
        p = scores.grid.library.in_rows(p, -2)
        # Nothing else is written to `tangent`: the call has none.
        memory = (None, None) if buffers is None else (buffers.product, buffers.tangent)
        add_weighted(xp, l[index], o[index], p, of_tile, *memory)
    if is_guarded or is_finite(xp, (l, o)):
        return l, o
    return _sums(scores, value, plan, rows, shift, is_guarded=True)
