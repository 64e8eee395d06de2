"""Loops over blocks of queries, which a compiler keeps: of long calls inside a jit.

A loop has one shape for all of its blocks, so it reads the same keys for each. If a mask leaves the first
queries fewer keys than the last ones, each band of queries gets a loop, with the keys of the band alone. On
several devices there is one band: a band of queries may lie on one device, and the others would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from .._libraries.protocols import Array, Namespace
from .._tiles.plan import Plan
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import RowBlock

OfBlock: TypeAlias = Callable[[RowBlock], tuple[dict[str, Array], Sequence[Array]]]
"""What a pass of a loop computes for its block of queries: arrays that are summed over the passes, and arrays
(..., rows, width)."""


def row_bands(grid: ScoreGrid, plan: Plan, key_range: Callable[[range], range]) -> list[range]:
    """Return the ranges of queries that get a loop each; some queries may attend the keys of `key_range`."""
    bands, loops = plan.bands(), grid.library.loops
    has_equal_keys = key_range(bands[0]) == key_range(bands[-1])
    return [range(plan.queries)] if has_equal_keys or (loops and loops.may_be_shared()) else bands


def compute_band(
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
