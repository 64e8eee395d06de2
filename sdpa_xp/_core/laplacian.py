r"""The forward Laplacian: the sum of second derivatives along directions, in the pass that computes the output.

Li et al., "A computational framework for neural network-based variational Monte Carlo with forward Laplacian",
arXiv 2307.08214. A prime is the derivative along direction n, s'' is the sum of the second derivatives of the
scores along all directions, v'' is the laplacian of the values. With e = exp(s - m), the sums of a row are

    l = sum e    l'_n = sum e s'    l'' = sum e (sum_n s'^2 + s'')
    o = sum e v    o'_n = sum e (s' v + v')
    o'' = sum e ((sum_n s'^2 + s'') v + 2 sum_n s' v' + v'')

The results are

    O = o / l    O'_n = (o'_n - l'_n O) / l    O'' = (o'' - l'' O - 2 sum_n l'_n O'_n) / l

Each s', and the sum beside v, is taken less one number of the row, as in `forward_mode.py`: no result changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple, cast

from .._libraries.protocols import Array
from .._tiles.plan import Plan
from .._tiles.tile import Allowed, Tile, is_masked
from . import score_tangents
from .products import Buffer, KeyValueSource, NonfiniteGuard, matmul_grouped, weigh
from .scores import Scores, Tangents
from .softmax import RowResult, avoid_zero_sum, finite_shift, running_sums, sums_without_keys


class QueryDerivatives(NamedTuple):
    """What each tile of a range of queries needs of these queries: of each direction, and of the laplacians."""

    tangents: Sequence[Tangents]
    """The last one is the laplacians, which the scores follow linearly, as they follow a tangent."""
    query_tangents: Sequence[Array | None]
    """Of the scaled queries."""
    operands: Sequence[Array | None]
    """See `Scores.tangent_operand`."""
    bend: Array | None
    """The second derivatives of the scaled queries, 2 scale' q', summed over the directions; None is 0."""


def attend_with_laplacian(
    scores: Scores, query: Array, value: KeyValueSource, plan: Plan, rows: range, guard: NonfiniteGuard
) -> RowResult:
    """Return the attention of a `scaled_query`, its tangent in each direction, and its laplacian."""
    xp, options, count = scores.xp, scores.options, len(scores.tangents) - 1
    inputs = _query_derivatives(scores, query, rows)
    values = value.slices(scores.grid)
    value_tangents = [None if t.value is None else t.value.slices(scores.grid) for t in inputs.tangents]
    ones = xp.full((1, 1), 1.0, dtype=scores.grid.dtype, device=scores.grid.device)
    centres: list[Array] = []

    def centred(n: int, array: Array, p: Array, l: Array) -> Array:
        if len(centres) == n:
            centres.append(_row_sum(scores, p * array) / avoid_zero_sum(l))
        return array - centres[n]

    def summands(tile: Tile, p: Array, allowed: Allowed, products: Array, _: Buffer | None) -> Iterator[Array]:
        factor = None if options.dropout is None else options.dropout.apply(tile, ones)

        def weighed(weights: Array, array: Array) -> Array:
            return weigh(xp, weights if factor is None else weights * factor, array, allowed, guard)

        l = _row_sum(scores, p)
        yield l
        of_tile = values(tile.columns)
        yield weighed(p, of_tile)
        score_tangents.try_functions(scores, tile, products, allowed)
        *changes, squares = _score_derivatives(scores, inputs, tile, products, allowed)
        mixed: list[Array] = []
        for n, change in enumerate(changes):
            moved = xp.zeros_like(p) if change is None else centred(n, change, p, l)
            if change is None and len(centres) == n:
                centres.append(xp.zeros_like(l))
            squares = moved * moved if squares is None else squares + moved * moved
            p_tangent = p * moved
            yield _row_sum(scores, p_tangent)
            o_tangent = weighed(p_tangent, of_tile)
            if (slices := value_tangents[n]) is not None:
                changed = slices(tile.columns)
                o_tangent = o_tangent + weighed(p, changed)
                mixed.append(weighed(p_tangent, changed) * 2.0)
            yield o_tangent
        p_bend = p * centred(count, cast(Array, squares), p, l)
        yield _row_sum(scores, p_bend)
        if (slices := value_tangents[count]) is not None:
            mixed.append(weighed(p, slices(tile.columns)))
        yield reduce(add, mixed, weighed(p_bend, of_tile))

    number = 2 + 2 * (count + 1)
    start = None if options.sinks is None else sums_without_keys(scores, query, number)
    sums = running_sums(scores, query, plan, rows, summands, start, keeps_products=options.needs_products)
    m, totals = sums or sums_without_keys(scores, query, number)
    l = cast(Array, totals[0])
    zero = xp.zeros_like(l)
    ls = [zero if x is None else x for x in totals[2::2]]
    o, *os = (
        xp.broadcast_to(zero, (*l.shape[:-1], value.width)) if x is None else x
        for x in (totals[1], *totals[3::2])
    )
    if options.sinks is not None:
        of_sinks = _of_sinks(scores, cast(Array, m), centres or [zero] * (count + 1))
        ls = [x + y for x, y in zip(ls, of_sinks, strict=True)]
    total = avoid_zero_sum(l)
    output = o / total
    tangents = [(os[n] - ls[n] * output) / total for n in range(count)]
    bent = os[count] - ls[count] * output
    for n, tangent in enumerate(tangents):
        bent = bent - ls[n] * tangent * 2.0
    return RowResult(output, m, l, (*tangents, bent / total))


def _row_sum(scores: Scores, array: Array) -> Array:
    return scores.xp.sum(array, axis=-1, keepdims=True)


def _query_derivatives(scores: Scores, query: Array, rows: range) -> QueryDerivatives:
    moved = [score_tangents.scaled_query_tangent(scores, rows, tangents) for tangents in scores.tangents]
    operands = [
        score_tangents.tangent_operand(scores, t, query, x) for t, x in zip(scores.tangents, moved, strict=True)
    ]
    bends = [
        scores._replace(query=tangents.query, options=tangents.options).scaled_query(rows) * 2.0
        for tangents in scores.tangents[:-1]
        if tangents.query is not None and tangents.scale is not None
    ]
    return QueryDerivatives(scores.tangents, moved, operands, reduce(add, bends) if bends else None)


def _score_derivatives(
    scores: Scores, inputs: QueryDerivatives, tile: Tile, products: Array, allowed: Allowed
) -> list[Array | None]:
    """Return s' of each direction, and s'', 0 where a pair may not attend; None is 0."""
    xp, slope = scores.xp, scores.slope(products, allowed)
    bends: list[Array] = []
    curved: list[Array] = []
    changes: list[Array | None] = []
    for tangents, query_tangent, operand in zip(*inputs[:3], strict=True):
        change = score_tangents.products_tangent(scores, tile, tangents, operand, allowed)
        if len(changes) == len(inputs.tangents) - 1:
            bends += [] if change is None else [change]
            break
        if tangents.key is not None and query_tangent is not None:
            key = tangents.key.slices(scores.grid)(tile.columns)
            bends.append(
                score_tangents.derived_product(scores, query_tangent, xp.matrix_transpose(key), allowed) * 2.0
            )
        if change is not None and slope is not None:
            capped = change * slope
            finite = scores.without_masked(products, allowed)
            curved.append(scores.slope_tangent(finite, capped) * change)
            change = capped
        changes.append(score_tangents.tangent(scores, tile, tangents, change, allowed))
    if inputs.bend is not None:
        keys = scores.key.slices(scores.grid, transposed=True)(tile.columns)
        bends.append(matmul_grouped(xp, inputs.bend, keys))
    bend = reduce(add, bends) if bends else None
    if bend is not None and slope is not None:
        bend = bend * slope
    bend = reduce(add, curved, bend) if bend is not None else reduce(add, curved) if curved else None
    return [*changes, score_tangents.tangent(scores, tile, inputs.tangents[-1], bend, allowed)]


def _of_sinks(scores: Scores, m: Array, centres: Sequence[Array]) -> list[Array]:
    """Return what the sinks add to l' of each direction, and to l''."""
    xp, sinks = scores.xp, cast(Array, scores.options.sinks)
    weight, bend = xp.exp(sinks - finite_shift(xp, m)), xp.zeros_like(m)
    added = []
    for tangents, centre in zip(scores.tangents, centres, strict=True):
        moved = -centre if tangents.options.sinks is None else tangents.options.sinks - centre
        added.append(weight * moved)
        bend = bend + moved * moved
    # The last one is no direction: the laplacian of the sinks counts as it is.
    added[-1] = weight * (bend - moved * moved + moved)
    return [xp.where(is_masked(sinks), 0.0, x) for x in added]
