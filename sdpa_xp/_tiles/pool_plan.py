"""How the blocks of a paged cache are computed in the order of their pool."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sdpa_xp._tiles.plan import takes_threads
from sdpa_xp._tiles.score_grid import ScoreGrid

LEAST_SCORES = 2**13
"""The scores of a call. Fewer of them take less time than it takes to put the blocks in order."""
MOST_ELEMENTS = 2**19
"""The elements of the queries or products of a run. In shorter runs, threads wait for each other's Python."""
MOST_MIXED = 128
"""The sequences of a run of more blocks than these: a product adds up each pair of a sequence and a block."""
MOST_UNUSED = 2
"""A pass over the pool may read this many times the tokens that it needs."""
LEAST_BLOCK = 8
"""The fewest tokens of a block. Copies of smaller blocks take less time than many small products."""
MOST_SEQUENCES = 8
"""The sequences, for each token of a block. With more, adding up the blocks takes longer than the copies."""


class LastToken(NamedTuple):
    """Where the last token of a sequence is in the pool."""

    block: int
    place: int


class BlockRun(NamedTuple):
    """Blocks that lie side by side in the pool."""

    blocks: range
    owners: list[int]
    """The sequence of each block; 0 for a block that no sequence has."""
    unused: list[int]
    """The numbers in the run of the blocks that no sequence has."""
    lengths: list[tuple[int, int]]
    """The numbers in the run of the blocks that are not full, each with its number of tokens."""


class PoolPlan(NamedTuple):
    """The work of a call: all blocks of all sequences, in the order of the pool."""

    last_tokens: list[LastToken]
    parts: list[list[BlockRun]]
    """The runs of each part of the pool. Sums are added up part by part, so that the number of threads that
    share the parts changes no bit."""
    takes_threads: bool


def plan_pool(
    grid: ScoreGrid, group: int, widths: int, tables: Sequence[Sequence[int]], lengths: Sequence[int], size: int
) -> PoolPlan | None:
    """Return the plan of a call whose queries attend to all tokens, or None if copies of the blocks are better.

    Copies are better if the call is small or has many queries, if blocks are very small, or very large for the
    number of sequences and heads, if two sequences share a block, or if the sequences use little of the pool.
    """
    rows, scores = grid.heads * grid.queries, grid.heads * grid.queries * sum(lengths)
    if scores < LEAST_SCORES or min(lengths) == 0 or group * grid.queries > size:
        return None
    if size < LEAST_BLOCK or len(tables) > MOST_SEQUENCES * size or rows * size > MOST_ELEMENTS:
        return None
    owners: dict[int, int] = {}
    last_tokens = []
    for sequence, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        last, place = divmod(length - 1, size)
        owners.update(dict.fromkeys(table[: last + 1], sequence))
        last_tokens.append(LastToken(table[last], place))
    first, stop = min(owners), max(owners) + 1
    blocks_of_sequences = sum(-(-length // size) for length in lengths)
    if len(owners) < blocks_of_sequences or (stop - first) * size > MOST_UNUSED * sum(lengths):
        return None
    has_threads = takes_threads(grid, scores * widths)
    most = max(1, MOST_ELEMENTS // (rows * max(widths // 2, size)))
    if len(tables) > MOST_MIXED:
        most = min(most, MOST_MIXED)
    # A part has more blocks than there are sequences, so that its sums take less memory than its values.
    parts = max(1, min(os.cpu_count() or 1, (stop - first) // len(tables))) if has_threads else 1
    runs_of_a_part = -(-(stop - first) // (parts * most))
    step = -(-(stop - first) // (parts * runs_of_a_part))
    not_full = {block: place + 1 for block, place in last_tokens if place + 1 < size}
    runs = [_run(range(n, min(n + step, stop)), owners, not_full) for n in range(first, stop, step)]
    groups = [runs[n : n + runs_of_a_part] for n in range(0, len(runs), runs_of_a_part)]
    return PoolPlan(last_tokens, groups, has_threads)


def _run(blocks: range, owners: Mapping[int, int], not_full: Mapping[int, int]) -> BlockRun:
    unused = [number for number, block in enumerate(blocks) if block not in owners]
    lengths = [(block - blocks.start, length) for block, length in not_full.items() if block in blocks]
    return BlockRun(blocks, [owners.get(block, 0) for block in blocks], unused, lengths)
