"""The groups of a ragged batch on a device: few calls of padded sequences, and one table of integers for all.

The grid of a group has the length of each sequence (`PaddedLengths`). The keys of the padding are masked, and
its rows are cut off from the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, cast

from sdpa_xp._call.prepared_call import PreparedCall
from sdpa_xp._call.ragged import DeviceTables, Group, is_contiguous, stack_sequences
from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.padding import Entries, HeadSizes, PaddedLengths, equal_lengths, padded_calls
from sdpa_xp._tiles.plan import Plan
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp.masks.algebra import AllOf
from sdpa_xp.masks.lengths import KeysBefore


class RaggedBatch(NamedTuple):
    """The sequences of a batch, as lists of integers that are known before the call."""

    lengths: Sequence[tuple[int, int]]
    """The numbers of queries and keys."""
    positions: Sequence[int]
    """The position of the first query of each sequence among its keys."""
    query_starts: Sequence[int]
    """Where the queries of each sequence begin; zeros if they are not packed."""
    key_starts: Sequence[int]
    block_table: Sequence[Sequence[int]] = ()
    block_size: int = 1


def padded_groups(
    call: PreparedCall, grid: ScoreGrid, batch: RaggedBatch, widths: int, plan_of: Callable[[ScoreGrid], Plan]
) -> list[Group]:
    """Return the groups of a batch, whose integers travel to the device at once; none without queries."""
    sizes = HeadSizes(grid.heads, max(1, grid.heads // call.sizes.group), widths)
    calls = padded_calls(equal_lengths(batch.lengths), sizes)
    groups = []
    for entries, (index, arrays, tables) in zip(calls, _tables(grid, batch, calls), strict=True):
        queries, keys = zip(*(batch.lengths[entry] for entry in entries), strict=True)
        positions = tuple(batch.positions[entry] for entry in entries)
        padding = PaddedLengths(queries, keys, positions, *arrays)
        of_group = grid.for_padded(entries, index, padding)
        bound = call.bind(of_group)
        if len({*keys}) > 1:
            bound = bound._replace(mask=AllOf((KeysBefore(padding.real_keys()), bound.mask)))
        groups.append(Group(entries, of_group, bound, plan_of(of_group), tables))
    return [group for group in groups if group.grid.queries] or groups[:1]


def _tables(
    grid: ScoreGrid, batch: RaggedBatch, calls: Sequence[Entries]
) -> Iterator[tuple[Array, tuple[Array, Array, Array], DeviceTables]]:
    """Return for each call its entries, the arrays of their `PaddedLengths`, and where the sequences lie."""
    xp, order = grid.xp, [*chain(*calls)]
    of_queries, of_keys = zip(*batch.lengths, strict=True)
    columns = of_queries, of_keys, batch.positions, batch.query_starts, batch.key_starts
    blocks = [_equal_rows(batch, entries) for entries in calls]
    integers = [*order, *(column[entry] for column in columns for entry in order)]
    moved = xp.asarray([*integers, *chain(*chain(*blocks))], dtype=xp.int32, device=grid.device)
    numbers = xp.reshape(moved[: len(integers)], (-1, len(order)))
    start, place = 0, len(integers)
    for entries, rows in zip(calls, blocks, strict=True):
        n, width = len(entries), len(rows[0])
        index, *of_scores, first_query, first_key = (
            numbers[row, start : start + n] for row in range(1 + len(columns))
        )
        queries, keys, positions = (xp.reshape(column, (n, 1, 1, 1)) for column in of_scores)
        table = xp.reshape(moved[place : place + n * width], (n, width))
        yield index, (queries, keys, positions), DeviceTables(first_query, first_key, table)
        start, place = start + n, place + n * width


def _equal_rows(batch: RaggedBatch, entries: Entries) -> list[list[int]]:
    """Return the blocks of sequences, as many of each: the last block of a shorter sequence is repeated."""
    if not batch.block_table:
        return [[] for _ in entries]
    counts = [-(-batch.lengths[entry][1] // batch.block_size) for entry in entries]
    rows = [[*batch.block_table[entry][:count]] for entry, count in zip(entries, counts, strict=True)]
    return [row + (row[-1:] or [0]) * (max(counts) - len(row)) for row in rows]


def gather_sequences(
    arrays: Sequence[Array], starts: Sequence[int], group: Group, *, of_keys: bool
) -> list[Array]:
    """Return queries, or keys and values, of packed arrays (heads, T, width) as (n, heads, longest, width).

    The padding repeats the last token of its sequence, so that no other sequence can be seen in it.
    """
    xp, entries = group.grid.xp, group.entries
    lengths = [starts[entry + 1] - starts[entry] for entry in entries]
    longest, is_equal = max(lengths), len({*lengths}) == 1
    if longest == 0:
        return [xp.expand_dims(array[:, :0, :], axis=0) for array in arrays]
    if is_equal and is_contiguous(entries):
        return [stack_sequences(array, starts, entries) for array in arrays]
    index = _token_index(group, longest, of_keys=of_keys, is_equal=is_equal)
    gathered = []
    for array in arrays:
        shape = array.shape[0], len(entries), longest, array.shape[-1]
        tokens = xp.reshape(xp.take(array, index, axis=1), shape)
        gathered.append(xp.permute_dims(tokens, (1, 0, 2, 3)))
    return gathered


def _token_index(group: Group, longest: int, *, of_keys: bool, is_equal: bool) -> Array:
    """Return the places of the tokens of all sequences of a group among the packed ones, (n * longest,)."""
    grid, xp = group.grid, group.grid.xp
    tables, padding = cast(DeviceTables, group.tables), grid.padding
    place = xp.expand_dims(grid.arange(0, longest), axis=0)
    if not is_equal and padding is not None:
        last = xp.reshape(padding.key_lengths if of_keys else padding.query_lengths, (-1, 1)) - 1
        place = xp.where(place < last, place, last)
    first = xp.expand_dims(tables.first_key if of_keys else tables.first_query, axis=-1)
    return xp.reshape(first + place, (-1,))
