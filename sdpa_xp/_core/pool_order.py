"""Attention over the blocks of a paged cache in the order of their pool, which gathers no copies of them.

Each block is multiplied where it lies, with the query of the sequence that it belongs to. A product with a
matrix of zeros and ones then adds up what the blocks of a sequence gave. The queries must attend to all tokens.

The softmax needs no second pass for its maximum: m is the score of the last token of a sequence. So one weight
is 1, and the sum keeps its digits as with the true maximum. The result is not finite if exp overflows because a
score is much larger than m, or if there is a NaN in the pool, be it where no token is. Then the caller computes
the call in another way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from .._libraries import astype_if_needed, computing, rows_at
from .._libraries.protocols import Array
from .._tiles.plan import takes_threads
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import Allowed, Tile
from . import threads
from .products import call_buffers, is_finite
from .scores import Scores
from .softmax import unshifted_sums, zero_sums

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

    last_tokens: list[tuple[int, int]]
    """The block of the last token of each sequence, and its place there."""
    parts: list[list[BlockRun]]
    """The runs of each part of the pool. Sums are added up part by part, so that the number of threads that
    share the parts changes no bit."""
    threads: int | None
    """As in `Plan`."""


def plan_pool(
    grid: ScoreGrid, group: int, widths: int, tables: Sequence[Sequence[int]], lengths: Sequence[int], size: int
) -> PoolPlan | None:
    """Return the plan of a call whose queries attend to all tokens, or None if copies of the blocks are better.

    Copies are better if the call is small or has many queries, if blocks are very small, or very large for the
    number of sequences and heads, if two sequences share a block, or if the sequences use little of the pool.
    """
    rows, scores = grid.heads * grid.queries, grid.heads * grid.queries * sum(lengths)
    # With more queries than a block has tokens, the products are larger than the copies would be.
    if scores < LEAST_SCORES or min(lengths) == 0 or group * grid.queries > size:
        return None
    if size < LEAST_BLOCK or len(tables) > MOST_SEQUENCES * size or rows * size > MOST_ELEMENTS:
        return None
    owners: dict[int, int] = {}
    last_tokens = []
    for sequence, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        last, place = divmod(length - 1, size)
        owners.update(dict.fromkeys(table[: last + 1], sequence))
        last_tokens.append((table[last], place))
    first, stop = min(owners), max(owners) + 1
    blocks_of_sequences = sum(-(-length // size) for length in lengths)
    # A block that two sequences share has one owner, so there are fewer owners than blocks.
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
    return PoolPlan(last_tokens, groups, None if has_threads else 1)


def _run(blocks: range, owners: Mapping[int, int], not_full: Mapping[int, int]) -> BlockRun:
    unused = [number for number, block in enumerate(blocks) if block not in owners]
    lengths = [(block - blocks.start, length) for block, length in not_full.items() if block in blocks]
    return BlockRun(blocks, [owners.get(block, 0) for block in blocks], unused, lengths)


def attend_in_pool_order(
    scores: Scores, key_blocks: Array, value_blocks: Array, plan: PoolPlan
) -> tuple[Array, Array] | None:
    """Return output (N, Hq, L, Ev) and log-sum-exp (N, Hq, L, 1) of all sequences; None if they are not finite.

    `scores` has the query (N, Hq, L, E); its keys are not read. The blocks are (P, H, size, E or Ev).
    """
    xp, grid, width = scores.xp, scores.grid, value_blocks.shape[-1]
    query = scores.scaled_query(range(grid.queries))
    blocks, places = (list(numbers) for numbers in zip(*plan.last_tokens, strict=True))
    m = _products(scores, query, xp.expand_dims(key_blocks[blocks, :, places, :], axis=-2))
    sums = [zero_sums(scores, grid.queries, width) for _ in plan.parts]

    def values(of_run: range) -> Array:
        return astype_if_needed(xp, value_blocks[of_run.start : of_run.stop, ...], grid.dtype)

    def compute(part: int) -> None:
        with computing(query):  # here too: a library may keep this setting for each thread
            runs, size = plan.parts[part], key_blocks.shape[-2]
            tiles = _computed_runs(with_buffers, query, key_blocks, runs, m)
            added = unshifted_sums(with_buffers, tiles, (values, None), size)
            for run, (_, l, o) in zip(runs, added, strict=True):
                if run.unused:  # what lies there may be NaN, which no product with zero removes
                    l[run.unused, ...] = o[run.unused, ...] = 0.0
                _add_to_owners(scores, run, (l, o), sums[part])

    with call_buffers(grid) as buffers:
        with_buffers = scores._replace(buffers=buffers)
        threads.run(compute, range(len(plan.parts)), plan.threads)
    l, o = sums[0]
    for of_l, of_o in sums[1:]:
        l += of_l
        o += of_o
    if scores.options.sinks is not None:
        l += xp.exp(scores.options.sinks - m)
    o /= l
    return (o, m + xp.log(l)) if is_finite(xp, (o, l)) else None


def _computed_runs(
    scores: Scores, query: Array, key_blocks: Array, runs: Iterable[BlockRun], m: Array
) -> Iterator[tuple[Tile, Array, Allowed, Array]]:
    """Yield each run as `Scores.computed_tiles` does a tile: its columns are blocks, and m is subtracted."""
    for run in runs:
        keys = key_blocks[run.blocks.start : run.blocks.stop, ...]
        s = _products(scores, rows_at(query, run.owners), keys)
        s -= rows_at(m, run.owners)
        for number, length in run.lengths:
            s[number, :, :, length:] = -math.inf  # nothing is stored behind the last token
        yield scores.tile(range(scores.grid.queries), run.blocks), s, True, s


def _products(scores: Scores, query: Array, keys: Array) -> Array:
    """Return the soft-capped scores of n queries with n blocks of keys, (n, Hq, L, size)."""
    return scores.products(
        query, scores.xp.matrix_transpose(astype_if_needed(scores.xp, keys, scores.grid.dtype))
    )


def _add_to_owners(scores: Scores, run: BlockRun, of_blocks: Sequence[Array], sums: Sequence[Array]) -> None:
    """Add what each block of a run gave to the sums of its sequence."""
    xp, grid, sequences = scores.xp, scores.grid, sorted({*run.owners})
    numbers = [xp.asarray(numbers, dtype=xp.int32, device=grid.device) for numbers in (sequences, run.owners)]
    is_owner = xp.astype(cast(Array, xp.expand_dims(numbers[0], axis=-1) == numbers[1]), grid.dtype)
    index = slice(None) if len(sequences) == scores.query.shape[0] else sequences
    for total, part in zip(sums, of_blocks, strict=True):
        added = is_owner @ xp.reshape(part, (len(run.owners), -1))
        total[index, ...] += xp.reshape(added, (len(sequences), *total.shape[1:]))
