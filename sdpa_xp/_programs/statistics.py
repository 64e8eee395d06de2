"""Statistics of the weights, tile by tile: memory grows with L + S, never with L * S.

The first pass reads the scores s of some queries: m, the largest score of each row, l, the sum of exp(s - m),
and t, the sum of exp(s - m) (s - m). With the weights w = exp(s - m) / l, the entropy of a row is

    -sum(w log w) = log(l) - t / l

Both terms are at least 0, so no digits cancel, whatever m is. This pass also finds the keys with the largest
scores. Sums over queries need the weights, so a second pass computes the scores again, with m and l known.

Tiles merge as in the online softmax: Milakov and Gimelshein, arXiv 1805.02867, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

from .._libraries.protocols import Array, Namespace
from .._run import avoid_zero_sum, finite_shift
from .._run.executors import joins, run
from .._run.program import Program, Results, between_zeros
from .._tiles import Target, Tile
from .._tiles.plan import Plan
from . import Scores
from .top_keys import LargestScores, top_of_tile

LEAST_DIFFERENCE = -1000.0
"""exp of less is 0 in float64 too. -inf would not do, because 0 * -inf is NaN."""

Computed: TypeAlias = dict[str, Array]
"""Arrays by name, (..., Hq, L, n) of the rows; "key_sums" (..., Hq, 1, S) and "block_sums" (..., Hq, M, N)."""


class Request(NamedTuple):
    """The statistics that a caller asks for."""

    row_max: bool
    entropy: bool
    key_sums: bool
    top_k: int
    """The number of keys to find for each query; 0 is none."""
    block_size: tuple[int, int] | None
    """The queries and keys of a block, if sums of blocks are asked for."""

    @property
    def needs_sums(self) -> bool:
        """Whether the maximum of a row is not enough."""
        return self.entropy or self.top_k > 0 or self.sums_queries

    @property
    def sums_queries(self) -> bool:
        """Whether weights are summed over queries, which takes the second pass."""
        return self.key_sums or self.block_size is not None


class RowStatistics(NamedTuple):
    """What is known of a range of queries after some of their keys, (..., Hq, rows, 1)."""

    m: Array
    """The largest score, -inf without keys."""
    l: Array | None = None
    """The sum of exp(score - m)."""
    t: Array | None = None
    """The sum of exp(score - m) (score - m)."""

    def rescaled(self, xp: Namespace, m: Array) -> RowStatistics:
        """Return the same sums with a larger `m`."""
        if self.l is None:
            return self._replace(m=m)
        change = _clipped(xp, self.m - finite_shift(xp, m))
        factor = xp.exp(change)
        t = None if self.t is None else (self.t + self.l * change) * factor
        return RowStatistics(m, self.l * factor, t)

    def merged(self, xp: Namespace, other: RowStatistics) -> RowStatistics:
        """Return the sums over the keys of both."""
        m = xp.maximum(self.m, other.m)
        first, second = self.rescaled(xp, m), other.rescaled(xp, m)
        l = None if first.l is None or second.l is None else first.l + second.l
        t = None if first.t is None or second.t is None else first.t + second.t
        return RowStatistics(m, l, t)


def _first_pass(
    scores: Scores, plan: Plan, rows: range, query: Array, request: Request
) -> tuple[RowStatistics, LargestScores | None]:
    """Return the sums of a `scaled_query` over the keys, without sinks; and the keys of the largest scores."""
    xp, sums, top = scores.xp, None, None
    for tile, s, _, _ in scores.computed_tiles(rows, plan, query):
        m = xp.max(s, axis=-1, keepdims=True)
        if request.top_k:
            top = top_of_tile(tile, s, m, request.top_k, top)
        new = _sums_of_tile(scores, s, m, request)
        sums = new if sums is None else sums.merged(xp, new)
    if sums is None:
        zero = xp.zeros_like(query[..., :1])  # on the device of the query
        sums = RowStatistics(
            zero - math.inf, zero if request.needs_sums else None, zero if request.entropy else None
        )
    if request.top_k:
        top = LargestScores.none(scores.grid, query, 1) if top is None else top
        top = top.padded(xp, request.top_k)
    return sums, top


def _sums_of_tile(scores: Scores, s: Array, m: Array, request: Request) -> RowStatistics:
    """Return the sums of a tile, whose scores are overwritten if there are buffers."""
    xp, buffers = scores.xp, scores.buffers
    if not request.needs_sums:
        return RowStatistics(m)
    shift = finite_shift(xp, m)
    if buffers is None:
        d = s - shift
        d = _clipped(xp, d) if request.entropy else d
        p = xp.exp(d)
        t = xp.sum(p * d, axis=-1, keepdims=True) if request.entropy else None
        return RowStatistics(m, xp.sum(p, axis=-1, keepdims=True), t)
    ones = buffers.ones(s.shape[-1])[: s.shape[-1], :]  # a product with ones is faster than a sum of rows
    s -= shift
    if not request.entropy:
        return RowStatistics(m, buffers.functions.exp(s, out=s) @ ones)
    s = buffers.functions.clip(s, LEAST_DIFFERENCE, None, out=s)
    p = buffers.functions.exp(s, out=buffers.tangent.array(s.shape))
    l = p @ ones
    p *= s
    return RowStatistics(m, l, p @ ones)


def _second_pass(
    scores: Scores, plan: Plan, rows: range, query: Array, shift: Array, total: Array
) -> Iterator[tuple[Tile, Array]]:
    """Yield the tiles with their weights, exp(s - shift) / total, 0 where masked; they may lie in a buffer."""
    xp, buffers = scores.xp, scores.buffers
    for tile, s, allowed, _ in scores.computed_tiles(rows, plan, query):
        if buffers is None:
            w = xp.exp(s - shift) / total
        else:
            s -= shift
            w = buffers.functions.exp(s, out=s)
            w /= total
        # In a row with a NaN each weight is NaN, but a masked pair has weight 0.
        yield tile, scores.without_masked(w, allowed)


def sums_of_blocks(xp: Namespace, array: Array, block: int, start: int) -> Array:
    """Return the sums of blocks of rows of (..., M, N), which are rows `start` to `start` + M of all."""
    *leading, rows, columns = array.shape
    before = min(-start % block, rows)
    whole = (rows - before) // block * block
    parts = []
    if before:
        parts.append(xp.sum(array[..., :before, :], axis=-2, keepdims=True))
    if whole:
        blocks = xp.reshape(array[..., before : before + whole, :], (*leading, whole // block, block, columns))
        parts.append(xp.sum(blocks, axis=-2))
    if before + whole < rows:
        parts.append(xp.sum(array[..., before + whole :, :], axis=-2, keepdims=True))
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-2) if parts else array


def _clipped(xp: Namespace, difference: Array) -> Array:
    """Return a difference of scores, at least `LEAST_DIFFERENCE`; a NaN stays."""
    return xp.where(difference < LEAST_DIFFERENCE, LEAST_DIFFERENCE, difference)


@dataclass(frozen=True, slots=True)
class StatisticsProgram(Program):
    """The statistics of a call."""

    scores: Scores
    request: Request

    def add_rows(self, results: Results, rows: range) -> None:
        scores, request, xp = self.scores, self.request, self.scores.xp
        query, sinks, row_tile = scores.scaled_query(rows), scores.options.sinks, scores.tile(rows, range(1))
        sums, top = _first_pass(scores, self.plan, rows, query, request)
        if request.row_max:
            self._add(results, "row_max", row_tile, sums.m)
        if sums.l is None:
            return
        total = sums.l
        if sinks is not None:  # they join the sum of the weights, but are no keys
            sums = sums.rescaled(xp, xp.maximum(sums.m, sinks))
            total = cast(Array, sums.l) + xp.exp(_clipped(xp, sinks - finite_shift(xp, sums.m)))
        m, l, t = sums.m, cast(Array, sums.l), sums.t
        safe, shift = avoid_zero_sum(total), finite_shift(xp, m)
        if t is not None:
            entropy = xp.where(l <= 0, 0.0, l / safe * xp.log(safe) - t / safe)  # -0 in a row without keys
            self._add(results, "entropy", row_tile, entropy)
        if top is not None:
            self._add(results, "top_weights", row_tile, xp.exp(top.scores - shift) / safe)
            # Of a row with a NaN nothing is known.
            self._add(results, "top_indices", row_tile, xp.where(xp.isnan(total), -1, top.keys))
        if not request.sums_queries:
            return
        for tile, weights in _second_pass(scores, self.plan, rows, query, shift, safe):
            new = weights if scores.block is None else scores.block.only_new(weights)
            if request.key_sums:
                self._add(results, "key_sums", tile, xp.sum(new, axis=-2, keepdims=True))
            if request.block_size is not None:
                self._add(results, "block_sums", tile, self._block_sums(tile, new, request.block_size))

    def _add(self, results: Results, name: str, tile: Tile, array: Array) -> None:
        """Add an array with an element for each head, also where scores were equal for several."""
        shape = (*self.scores.leading_shape, *array.shape[-2:])
        whole = array if array.shape == shape else self.scores.xp.broadcast_to(array, shape)
        results[name].add(tile, whole)

    def _block_sums(self, tile: Tile, weights: Array, block_size: tuple[int, int]) -> Array:
        """Return the sums of the blocks of a tile; if these are joined later, (..., all blocks)."""
        grid, xp, target = tile.grid, tile.grid.xp, self.targets["block_sums"]
        (first_row, first), (rows, columns) = (tile.rows.start, tile.columns.start), block_size
        by_key = xp.matrix_transpose(sums_of_blocks(xp, xp.matrix_transpose(weights), columns, first))
        if tile.block is not None:  # its rows may lie anywhere, so a product takes each to its block
            numbers = xp.expand_dims(grid.arange(0, target.shape[-2]), axis=-1)
            is_in_block = cast(Array, xp.matrix_transpose(tile.row_index // rows) == numbers)
            sums = xp.astype(is_in_block, grid.dtype) @ by_key
        else:
            sums = sums_of_blocks(xp, by_key, rows, first_row)
        for axis, start in ((-2, first_row // rows), (-1, first // columns)):
            missing = target.shape[axis] - sums.shape[axis] if target.axes[axis] is None else 0
            if missing:
                sums = between_zeros(grid, sums, axis, start, missing - start)
        return sums


def statistics(scores: Scores, plan: Plan, request: Request) -> Computed:
    """Return the statistics that are asked for, in the accumulation dtype; indices of keys are int32."""
    grid = scores.grid
    shape, whole = grid.leading_shape, (plan.queries, plan.keys)
    widths = {
        "row_max": int(request.row_max),
        "entropy": int(request.entropy),
        "top_weights": request.top_k,
        "top_indices": request.top_k,
    }
    dtypes = {"top_indices": scores.xp.int32}
    targets = {
        name: Target((*shape, plan.queries, width), ("rows", None), dtype=dtypes.get(name))
        for name, width in widths.items()
        if width
    }
    if request.key_sums:
        targets["key_sums"] = Target((*shape, 1, plan.keys), (None, "columns"))
    if request.block_size is not None:
        blocks = tuple([-(-n // size) for n, size in zip(whole, request.block_size, strict=True)])
        target = Target((*shape, *blocks), ("rows", "columns"), block=request.block_size)
        # Blocks of one tile may be blocks of the next, and pieces of an array that is joined may not overlap.
        targets["block_sums"] = target._replace(axes=(None, None)) if joins(plan, grid) else target
    plan = plan.with_common_borders()  # for the sums over queries
    return run(StatisticsProgram(scores.for_tiles()._replace(known_tiles=None), plan, targets, request))
