r"""Derivatives of the output in the pass that computes it: forward mode, tile by tile.

Lu and Song, "Simplifying, Stabilizing and Scaling Continuous-Time Consistency Models", arXiv 2410.11081,
appendix F. With the scores s of a tile, their tangent s', and e = exp(s - m), the sums of a row are

    l = sum e    o = sum e v    l' = sum e (s' - c)    o' = sum e ((s' - c) v + v')

The output is o / l, and its tangent (o' - l' o / l) / l. A sink adds to l and l'. Dropout drops weights in o
and o' alone. m and c are numbers of the row, which fall out of both results: c is the mean of s' over the first
tile. Without it, o' and l' o / l would be large, with a small difference, if all scores of a row change alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from .._libraries.protocols import Array
from .._tiles.plan import Plan
from .._tiles.tile import Allowed, Tile, is_masked
from . import score_tangents
from .in_place import minus, row_sums, times
from .products import Buffer, KeyValueSource, NonfiniteGuard, weigh
from .scores import Scores
from .softmax import LEAST_SUM, RowResult, avoid_zero_sum, finite_shift, running_sums, sums_without_keys


def attend_with_tangents(
    scores: Scores,
    query: Array,
    value: KeyValueSource,
    plan: Plan,
    rows: range,
    guard: NonfiniteGuard,
    *,
    has_fixed_shift: bool = False,
) -> RowResult:
    """Return the attention of a `scaled_query`, and its tangent in the direction of the scores."""
    xp, grid, options, buffers = scores.xp, scores.grid, scores.options, scores.buffers
    (tangents,) = scores.tangents
    query_tangent = score_tangents.scaled_query_tangent(scores, rows, tangents)
    operand = score_tangents.tangent_operand(scores, tangents, query, query_tangent)
    values = value.slices(grid)
    value_tangents = None if tangents.value is None else tangents.value.slices(grid)
    has_change = operand is not None or len(tangents.options.biases) > 0
    ones = xp.full((1, 1), 1.0, dtype=grid.dtype, device=grid.device)
    centre: Array | None = None

    def summands(
        tile: Tile, p: Array, allowed: Allowed, products: Array, memory: Buffer | None
    ) -> Iterator[Array]:
        nonlocal centre
        l = row_sums(buffers, xp, p)
        yield l
        factor = None if options.dropout is None else options.dropout.apply(tile, ones)
        kept = p if factor is None else p * factor
        yield weigh(xp, kept, values(tile.columns), allowed, guard, memory)
        score_tangents.try_functions(scores, tile, products, allowed)
        if value_tangents is not None:
            yield weigh(xp, kept, value_tangents(tile.columns), allowed, guard, memory)
        capped_tangent = score_tangents.capped_tangent(scores, tile, tangents, operand, products, allowed)
        change = score_tangents.tangent(scores, tile, tangents, capped_tangent, allowed)
        if change is None:
            return
        if centre is None:
            centre = row_sums(buffers, xp, p * change) / avoid_zero_sum(l, least)
        # Without products that move, the change is a slice of the caller's tangent of a bias.
        change = times(buffers, minus(None if capped_tangent is None else buffers, change, centre), p)
        yield row_sums(buffers, xp, change)
        kept = change if factor is None else change * factor
        yield weigh(xp, kept, values(tile.columns), allowed, guard, memory)

    least = LEAST_SUM if has_fixed_shift else 1.0
    count = 2 + (value_tangents is not None) + 2 * has_change
    start = None if options.sinks is None else sums_without_keys(scores, query, count)
    sums = running_sums(
        scores,
        query,
        plan,
        rows,
        summands,
        start,
        keeps_products=options.needs_products,
        has_fixed_shift=has_fixed_shift,
    )
    m, (l, o, *others) = sums or sums_without_keys(scores, query, count)
    l = cast(Array, l)
    zero = xp.zeros_like(l)
    o = xp.broadcast_to(zero, (*l.shape[:-1], value.width)) if o is None else o
    total = avoid_zero_sum(l, least)
    output = o / total
    l_tangent = others[-2] if has_change else None
    if options.sinks is not None:
        change = zero if tangents.options.sinks is None else tangents.options.sinks
        change = change if centre is None else change - centre
        of_sink = xp.exp(options.sinks - finite_shift(xp, cast(Array, m)))
        of_sink = xp.where(is_masked(options.sinks), 0.0, of_sink * change)
        l_tangent = of_sink if l_tangent is None else l_tangent + of_sink
    changes = [
        x
        for x in (others[0] if value_tangents is not None else None, others[-1] if has_change else None)
        if x is not None
    ]
    if l_tangent is not None:
        changes.append(-l_tangent * output)
    derivative = sum(changes[1:], changes[0]) / total if changes else xp.zeros_like(output)
    return RowResult(output, m, l, (derivative,))
