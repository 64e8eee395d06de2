"""Gradients of attention tile by tile: memory grows with L + S, never with L * S.

Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2. The scores s of a tile are made again, by the code that
made them first. With P = exp(s - lse), O the output and dO its cotangent, and * elementwise,

    dV = P^T dO    dP = dO V^T    dS = P * (dP - D) with D = rowsum(dO * O)    dQ = dS K    dK = dS^T Q

A soft cap multiplies dS by its derivative on the way to dQ and dK; a sink has the gradient -exp(sink - lse) D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from sdpa_xp import threads
from sdpa_xp._libraries import astype_if_needed, is_traced, quiet
from sdpa_xp._libraries.protocols import Array, Namespace, Shape
from sdpa_xp.biases.algebra import is_masked
from sdpa_xp.masks.algebra import Allowed
from sdpa_xp.scores import Scores, matmul_grouped, matmul_over_group, of_keys
from sdpa_xp.sources import Source
from sdpa_xp.tiles import Part, Plan, Tile, cut_leading
from sdpa_xp.totals import Learned, Total


class Forward(NamedTuple):
    """A call and what it gave: all that its gradients follow from."""

    scores: Scores
    value: Source
    output: Array
    """(..., Hq, L, Ev), in the accumulation dtype."""
    lse: Array
    """(..., Hq, L, 1)."""
    learned: Mapping[str, Learned]
    """The arrays whose gradients are asked for."""
    terms: tuple[str | None, ...]
    """The name of what each bias learns."""
    plan: Plan

    def of(self, part: Part | None) -> Forward:
        """That of a part of (..., Hq)."""
        if part is None:
            return self
        return self._replace(
            scores=self.scores.of(part),
            value=self.value.of(of_keys(part, self.scores.group)),
            output=cut_leading(self.output, part),
            lse=cut_leading(self.lse, part),
            learned={name: each.of(part) for name, each in self.learned.items()},
        )

    def in_one_tile(self) -> Forward:
        """For values that cannot be read; a compiler's loop over the queries sums over none of its passes."""
        pairs = replace(self.scores.pairs, execution_kind="traced")
        rows, columns = max(1, self.plan.queries), max(1, self.plan.keys)
        plan = replace(self.plan, rows=rows, columns=columns, parts=(), rolled=False)
        return self._replace(scores=self.scores._replace(pairs=pairs), plan=plan)


class Rows(NamedTuple):
    """What a range of queries brings to each of its tiles."""

    query: Array
    """Times the scale, (..., Hq, rows, E)."""
    cotangent: Array
    """(..., Hq, rows, Ev)."""
    delta: Array
    """rowsum(dO * O), (..., Hq, rows, 1)."""
    shift: Array
    """The log-sum-exp; 0 in a row without a key."""


def gradients(forward: Forward, cotangent: Array) -> dict[str, Array]:
    """The gradient of each array that is learned, in the accumulation dtype.

    What is masked has a weight of 0, and 0 * NaN is NaN. So where a gradient comes out as one, all are computed
    once more, and pairs that may not attend are left out of the products one by one.
    """
    scores = forward.scores
    if scores.pairs.traced or is_traced(cotangent):
        return _of_all(forward.in_one_tile(), cotangent, guarded=True)
    found = _of_all(forward, cotangent, guarded=False)
    if scores.unmasked or not _any_nonfinite(scores.xp, found):
        return found
    return _of_all(forward, cotangent, guarded=True)


def _of_all(forward: Forward, cotangent: Array, *, guarded: bool) -> dict[str, Array]:
    """A part after the other; where arrays are written to, in threads."""
    plan, pairs = forward.plan, forward.scores.pairs
    if not pairs.writeable:
        return _of_part(forward, cotangent, guarded=guarded)
    found = {
        name: pairs.xp.zeros(each.shape, dtype=pairs.dtype, device=pairs.device)
        for name, each in forward.learned.items()
    }
    small = [name for name, each in forward.learned.items() if each.along == (None, None)]
    later: dict[Part | None, dict[str, Array]] = {}

    def add(parts: list[Part | None]) -> None:
        with quiet(cotangent):  # NumPy 1 keeps it by the thread
            for part in parts:
                here = cotangent if part is None else cut_leading(cotangent, part)
                own = _of_part(forward.of(part), here, guarded=guarded)
                later[part] = {name: own.pop(name) for name in small}
                for name, gradient in own.items():
                    found[name][forward.learned[name].slices(part)] += gradient

    large = [each for name, each in forward.learned.items() if name not in small]
    threads.run(add, _apart(plan.parts, large, pairs.leading), plan.threads)
    for part in plan.parts or (None,):
        for name, gradient in later[part].items():
            found[name][forward.learned[name].slices(part)] += gradient
    return found


def _apart(parts: Sequence[Part], learned: Iterable[Learned], leading: Shape) -> list[list[Part | None]]:
    """The parts in lists of those that add to one array, so that each sum has an order of its own."""
    if not parts:
        return [[None]]
    shared = [any(axis) for axis in zip(*(each.repeats(leading) for each in learned), strict=True)]
    lists: dict[tuple[range, ...], list[Part | None]] = {}
    for part in parts:
        own = tuple(each for each, among in zip(part, shared, strict=True) if not among)
        lists.setdefault(own, []).append(part)
    return [*lists.values()]


def _of_part(forward: Forward, cotangent: Array, *, guarded: bool) -> dict[str, Array]:
    totals = {name: Total(each, forward.plan, forward.scores.pairs) for name, each in forward.learned.items()}
    for rows in forward.plan.row_ranges():
        _add_rows(totals, forward, cotangent, rows, guarded=guarded)
    return {name: total.array() for name, total in totals.items()}


def _add_rows(
    totals: Mapping[str, Total], forward: Forward, cotangent: Array, rows: range, *, guarded: bool
) -> None:
    scores = forward.scores
    xp, dtype = scores.xp, scores.pairs.dtype
    here = scores.tile(rows, range(1))
    own = astype_if_needed(xp, here.of_queries(cotangent), dtype)
    lse = here.of_queries(forward.lse)
    delta = xp.sum(own * here.of_queries(forward.output), axis=-1, keepdims=True)
    state = Rows(scores.scaled_query(rows), own, delta, xp.where(is_masked(lse), 0.0, lse))
    to_query: Array | None = None
    for tile, allowed in _tiles(scores, rows, forward.plan):
        added = _add_tile(totals, forward, state, tile, allowed, guarded=guarded)
        to_query = added if to_query is None else to_query + added
    if scores.sinks is not None:
        totals["sinks"].add(here, -xp.exp(scores.sinks - state.shift) * delta)
    if to_query is None:
        return
    query, scale = astype_if_needed(xp, here.of_queries(scores.query), dtype), scores.scale
    if not isinstance(scale, float):
        scale = astype_if_needed(xp, here.cut(scale), dtype)
        scale, query = (_finite(xp, x) if guarded else x for x in (scale, query))
    totals["query"].add(here, to_query * scale)
    if "scale" in totals:
        totals["scale"].add(here, xp.sum(to_query * query, axis=-1, keepdims=True))


def _tiles(scores: Scores, rows: range, plan: Plan) -> Iterator[tuple[Tile, Allowed]]:
    """The tiles of `rows` in which a pair may attend, all cut at the same keys as those of other rows."""
    for columns in plan.column_ranges(range(plan.keys)):
        tile = scores.tile(rows, columns)
        allowed = scores.mask.on(tile)
        if allowed is not False:
            yield tile, allowed


def _add_tile(
    totals: Mapping[str, Total], forward: Forward, rows: Rows, tile: Tile, allowed: Allowed, *, guarded: bool
) -> Array:
    """Add what a tile contributes; returns what it does to the gradient of the scaled queries."""
    scores, xp, dtype = forward.scores, forward.scores.xp, forward.scores.pairs.dtype
    key, value = scores.keys(tile.columns), astype_if_needed(xp, forward.value.cut(tile.columns), dtype)
    capped = scores.capped(tile, rows.query)
    s, allowed = scores.biased(tile, capped, allowed)
    if guarded and not isinstance(allowed, bool):
        capped = xp.where(allowed, capped, 0.0)
    slope = None if scores.softcap is None else _slope(capped, scores.softcap)
    p = xp.exp(s - rows.shift)
    dp = matmul_grouped(xp, rows.cotangent, xp.matrix_transpose(value))
    kept = p
    if scores.dropout is not None:
        ones = xp.full((1, 1), 1.0, dtype=dtype, device=scores.pairs.device)
        factor = scores.dropout.apply(tile, ones)
        kept, dp = p * factor, dp * factor
    ds = p * (dp - rows.delta)
    if guarded and not isinstance(allowed, bool):
        kept, ds = xp.where(allowed, kept, 0.0), xp.where(allowed, ds, 0.0)
    guard = allowed if guarded else True

    def over_group(weights: Array, operand: Array) -> Array:
        return matmul_over_group(xp, weights, operand, key.shape[-3])

    def grouped(weights: Array, operand: Array) -> Array:
        return matmul_grouped(xp, weights, operand)

    totals["value"].add(tile, _met(xp, over_group, kept, rows.cotangent, guard))
    for term, name in zip(scores.biases, forward.terms, strict=True):
        learned = term.gradient(tile, capped, ds)
        if name is not None and learned is not None:
            totals[name].add(tile, learned)
    if slope is not None:
        ds = ds * slope
    totals["key"].add(tile, _met(xp, over_group, ds, rows.query, guard))
    return _met(xp, grouped, ds, key, guard)


def _met(
    xp: Namespace, product: Callable[[Array, Array], Array], weights: Array, operand: Array, allowed: Allowed
) -> Array:
    """`product` of them, where a NaN or inf of the operand is met by the pairs that may attend alone."""
    if isinstance(allowed, bool):
        return product(weights, operand)
    strange = ~xp.isfinite(operand)
    attends = xp.astype(xp.broadcast_to(allowed, weights.shape), weights.dtype)
    met = product(attends, xp.astype(strange, weights.dtype)) > 0.0
    return xp.where(met, math.nan, product(weights, xp.where(strange, 0.0, operand)))


def _slope(capped: Array, softcap: float) -> Array:
    """The derivative of softcap * tanh(x / softcap), 1 - tanh^2."""
    share = capped / softcap
    return -(share * share) + 1.0


def _finite(xp: Namespace, x: Array) -> Array:
    return xp.where(xp.isfinite(x), x, 0.0)


def _any_nonfinite(xp: Namespace, found: Mapping[str, Array]) -> bool:
    """Whether a NaN or inf got in, as far as that can be seen."""
    return any(is_traced(each) or not bool(xp.isfinite(xp.sum(each))) for each in found.values())
