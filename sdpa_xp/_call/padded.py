"""The groups of a ragged batch on a device: few calls of padded sequences, and one table of integers for all.

The grid of a group has the length of each sequence (`PaddedLengths`). The keys of the padding are masked, and
its rows are cut off from the output.

On a device each operation costs a launch, however few its numbers are. So sequences share a call if their
padding costs less than the launches of another call. Longer sequences have calls of their own, so that memory
stays linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, cast

from .._libraries.protocols import Array
from .._tiles.on_device import PaddedLengths
from .._tiles.plan import Plan
from .._tiles.score_grid import ScoreGrid
from ..masks.lengths import KeysBefore
from ..masks.patterns import AllOf
from .prepared_call import PreparedCall
from .ragged import DeviceTables, Entries, Group, is_contiguous, stack_sequences


def equal_lengths(lengths: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], Entries]:
    """Return the sequences of each pair of lengths (queries, keys)."""
    groups: dict[tuple[int, int], list[int]] = {}
    for entry, pair in enumerate(lengths):
        groups.setdefault(pair, []).append(entry)
    return {pair: tuple(entries) for pair, entries in groups.items()}


class Work(NamedTuple):
    """How much a call computes and copies."""

    scores: int
    elements: int
    """The elements of queries, keys and values."""


WORK_OF_LAUNCHES = Work(2**22, 2**23)
"""The work that takes about as long as the 40 launches of a call of one tile: a tile of `plan.DEVICE`, and
copies of 32 MiB of float32. It is an estimate, which no GPU has measured."""


class HeadSizes(NamedTuple):
    """What the work of a sequence follows from besides its lengths."""

    query_heads: int
    key_heads: int
    widths: int
    """E + Ev."""

    def work(self, sequences: int, queries: int, keys: int) -> Work:
        """Return the work of a call of sequences of equal lengths."""
        rows = queries * self.query_heads + keys * self.key_heads
        return Work(sequences * self.query_heads * queries * keys, sequences * rows * self.widths)


class _Call(NamedTuple):
    """Sequences that are padded to the same lengths."""

    entries: Entries
    queries: int
    keys: int
    real: Work
    """The work without padding."""

    @property
    def has_pairs(self) -> bool:
        return self.queries > 0 and self.keys > 0

    def joined(self, other: _Call) -> _Call:
        real = Work(*(one + two for one, two in zip(self.real, other.real, strict=True)))
        longest = max(self.queries, other.queries), max(self.keys, other.keys)
        return _Call((*self.entries, *other.entries), *longest, real)

    def padded(self, sizes: HeadSizes) -> Work:
        return sizes.work(len(self.entries), self.queries, self.keys)


def padded_calls(by_lengths: Mapping[tuple[int, int], Entries], sizes: HeadSizes) -> list[Entries]:
    """Divide sequences, grouped by their lengths (queries, keys), among few padded calls.

    Two calls become one if this adds at most `WORK_OF_LAUNCHES`, and if the padding of the joined call is at
    most the work of its sequences, or `WORK_OF_LAUNCHES` if that is more. A sequence without queries or without
    keys is never padded with pairs that masks and biases would be asked about.
    """
    calls: list[_Call] = []
    for queries, keys in sorted(by_lengths, key=_by_size):
        entries = by_lengths[queries, keys]
        call = _Call(entries, queries, keys, sizes.work(len(entries), queries, keys))
        if calls and _is_worth_joining(calls[-1], call, sizes):
            calls[-1] = calls[-1].joined(call)
        else:
            calls.append(call)
    return [tuple(sorted(call.entries)) for call in calls]


def _by_size(lengths: tuple[int, int]) -> tuple[bool, int, int, int]:
    """Return what puts sequences of similar lengths side by side, from small to large."""
    queries, keys = lengths
    return queries > 0 and keys > 0, queries.bit_length(), keys, queries


def _is_worth_joining(one: _Call, other: _Call, sizes: HeadSizes) -> bool:
    if (one.queries > 0, one.has_pairs) != (other.queries > 0, other.has_pairs):
        return False
    joined = one.joined(other)
    works = zip(joined.padded(sizes), one.padded(sizes), other.padded(sizes), strict=True)
    added = [both - first - second for both, first, second in works]
    padding = [padded - real for padded, real in zip(joined.padded(sizes), joined.real, strict=True)]
    most = map(max, joined.real, WORK_OF_LAUNCHES)
    return all(map(int.__le__, added, WORK_OF_LAUNCHES)) and all(map(int.__le__, padding, most))


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
    # Without any query one group stays, from which the output has its shape and its dtype.
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
    # A sequence without tokens has no block to repeat: it gets block 0, of which its mask hides all keys.
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
