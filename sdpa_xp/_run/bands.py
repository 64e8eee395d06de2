"""Loops over blocks of queries, which a compiler keeps: of long calls inside a jit.

A loop has one shape for all of its blocks, so it reads the same keys for each. If a mask leaves the first
queries fewer keys than the last ones, each band of queries gets a loop, with the keys of the band alone. On
several devices there is one band: a band of queries may lie on one device, and the others would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import TypeAlias

from .._libraries.protocols import Array, Namespace
from .._tiles import RowBlock, Target
from .._tiles.grid import ScoreGrid
from .._tiles.plan import Plan
from .program import Program, between_zeros, in_pieces, joined

OfBlock: TypeAlias = Callable[[RowBlock], tuple[dict[str, Array], Sequence[Array]]]
"""What a pass of a loop computes for its block of queries: arrays that are summed over the passes, and arrays
(..., rows, width)."""


def run_in_loops(program: Program) -> dict[str, Array]:
    """Return the targets of a call whose values cannot be read, in loops that the compiler keeps."""
    ranges = _row_bands(program.grid, program.plan, program.scores.key_range)
    bands = [_run_band(program, band) for band in ranges]
    if len(bands) == 1:
        return bands[0]
    join = partial(program.grid.xp.concat, axis=-2)
    return {
        name: (join if target.axes[0] == "rows" else partial(reduce, add))([band[name] for band in bands])
        for name, target in program.targets.items()
    }


def _run_band(program: Program, band: range) -> dict[str, Array]:
    """Return the sums over a band of queries, or its rows of what has a row for each query."""
    targets, scores = program.targets, program.scores
    columns, plan = scores.key_range(band) or range(0), program.plan  # an empty one may begin anywhere
    of_rows = [name for name, target in targets.items() if target.axes[0] == "rows"]
    has_sums = len(of_rows) < len(targets)
    if has_sums:  # over the keys of the band at once
        plan = replace(plan, columns=max(1, len(columns)), align=1)

    def compute(block: RowBlock) -> tuple[dict[str, Array], list[Array]]:
        results = in_pieces(program, [range(band.start, band.start + block.length)], [columns])
        replace(program, plan=plan, scores=scores.in_block(block)).add_rows(results, band)
        sums = joined(results)
        return sums, [sums.pop(name) for name in of_rows]

    sums, others = _compute_band(program.grid, plan, band, compute, has_sums=has_sums)
    sums |= zip(of_rows, others, strict=True)
    return {
        name: _in_all_columns(program.grid, x, targets[name], columns, plan.keys) for name, x in sums.items()
    }


def _in_all_columns(grid: ScoreGrid, array: Array, target: Target, columns: range, keys: int) -> Array:
    """Return the sum of a target from its part of some keys: 0 for the others."""
    if "columns" not in target.axes or len(columns) == keys:
        return array
    return between_zeros(grid, array, target.axes.index("columns") - 2, columns.start, keys - columns.stop)


def _row_bands(grid: ScoreGrid, plan: Plan, key_range: Callable[[range], range]) -> list[range]:
    """Return the ranges of queries that get a loop each; some queries may attend the keys of `key_range`."""
    bands, loops = plan.bands(), grid.library.loops
    has_equal_keys = key_range(bands[0]) == key_range(bands[-1])
    return [range(plan.queries)] if has_equal_keys or (loops and loops.may_be_shared()) else bands


def _compute_band(
    grid: ScoreGrid, plan: Plan, band: range, compute: OfBlock, *, has_sums: bool
) -> tuple[dict[str, Array], list[Array]]:
    """Return the sums of a band of queries, and the other arrays with all of its rows.

    All blocks have the same length, because the compiler needs fixed shapes. If that length divides the number
    of queries, block n of N has every N-th query from n on, so that each pass uses all devices that hold
    queries. Otherwise the last block begins early enough to be full, and repeats rows of the one before.
    """
    xp, queries, rows = grid.xp, len(band), min(plan.rows, len(band))
    passes = -(-queries // rows)
    is_even = passes * rows == queries
    step = passes if is_even else 1

    def compute_pass(number: Array) -> tuple[dict[str, Array], list[Array]]:
        start, is_new = number, None
        if step == 1:
            start = xp.clip(number * rows, 0, queries - rows)
        if has_sums and not is_even:
            is_new = xp.expand_dims(grid.arange(0, rows) + start >= number * rows, axis=-1)
        sums, others = compute(RowBlock(start, rows, step, is_new))
        return sums, [*others]

    loops = grid.library.loops
    assert loops is not None
    sums, blocks = loops.rolled(compute_pass, grid.arange(0, passes), has_sums=has_sums)
    join = _interleave_blocks if step > 1 else _join_blocks
    return sums, [join(xp, array, queries) for array in blocks]


def _interleave_blocks(xp: Namespace, blocks: Array, queries: int) -> Array:
    """Return (blocks, ..., rows, width) as (..., L, width), where block n has every N-th row from n on."""
    *leading, rows, width = range(1, blocks.ndim)
    shape = blocks.shape
    return xp.reshape(xp.permute_dims(blocks, (*leading, rows, 0, width)), (*shape[1:-2], queries, shape[-1]))


def _join_blocks(xp: Namespace, blocks: Array, queries: int) -> Array:
    """Return (blocks, ..., rows, width) as (..., L, width), without the rows that the last block repeats."""
    count, *leading, rows, width = blocks.shape
    axes = (*range(1, blocks.ndim - 2), 0, blocks.ndim - 2, blocks.ndim - 1)
    joined = xp.reshape(xp.permute_dims(blocks, axes), (*leading, count * rows, width))
    repeated, start_of_last = count * rows - queries, (count - 1) * rows
    if not repeated:
        return joined
    return xp.concat([joined[..., :start_of_last, :], joined[..., start_of_last + repeated :, :]], axis=-2)
