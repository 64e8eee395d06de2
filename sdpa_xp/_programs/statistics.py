"""Statistics of the weights, as sums over the tiles of a call.

What a range of queries computes, and how, is in `row_statistics.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from .._libraries.protocols import Array
from .._run.executors import Program, joins, run
from .._run.results import Results, between_zeros
from .._tiles.plan import Plan
from .._tiles.tile import Target, Tile
from .row_statistics import Computed, Request, as_rows, statistics_of_rows, sums_of_blocks
from .scores import Scores


@dataclass(frozen=True, slots=True)
class StatisticsProgram(Program):
    """The statistics of a call."""

    scores: Scores
    request: Request

    def add_rows(self, results: Results, rows: range) -> None:
        scores, request, xp = self.scores, self.request, self.scores.xp

        def add_weights(tile: Tile, weights: Array) -> None:
            weights = weights if scores.block is None else scores.block.only_new(weights)
            if request.key_sums:
                results["key_sums"].add(tile, self._whole(xp.sum(weights, axis=-2, keepdims=True)))
            if request.block_size is not None:
                results["block_sums"].add(
                    tile, self._whole(self._block_sums(tile, weights, request.block_size))
                )

        computed = statistics_of_rows(scores, self.plan, rows, request, add_weights)
        for name, array in computed.items():
            results[name].add(scores.tile(rows, range(1)), array)

    def _whole(self, sums: Array) -> Array:
        """Return sums with an element for each head, also where scores were equal for several."""
        return as_rows(self.scores.xp, sums, (*self.scores.leading_shape, *sums.shape[-2:]))

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
