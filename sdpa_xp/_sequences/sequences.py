"""Sequences of unlike lengths, packed or in pages: where they lie, and which of them are computed together.

Sequences of equal lengths are computed together. On a device each operation costs a launch, however few its
numbers are. So there, unlike sequences share a group if their padding costs less than the launches of another
group. Longer sequences have groups of their own, so that memory stays linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

from .._libraries.protocols import Array
from .._tiles import tuning
from .._tiles.grid import ScoreGrid
from .._tiles.plan import Plan, plan_pages, plan_tiles
from .._tiles.tuning import Work

Entries: TypeAlias = tuple[int, ...]
"""The numbers of some sequences, in order."""
ENTRY, POSITION, LENGTHS, STARTS, PAGES = 0, 1, 2, 4, 6
"""The columns of a table on a device: lengths and starts have one for the queries and one for the keys."""
Lengths: TypeAlias = Sequence[tuple[int, int]]
"""The numbers of queries and keys of each sequence."""


def lengths_of(starts: Sequence[int]) -> list[int]:
    """Return the length of each sequence of a packed array, from where they begin and where the last ends."""
    return [last - first for first, last in pairwise(starts)]


def is_contiguous(entries: Entries) -> bool:
    """Return whether no other sequence lies between these."""
    return entries[-1] - entries[0] == len(entries) - 1


class Sequences(NamedTuple):
    """The sequences of a batch, as integers that are known before the call."""

    lengths: Lengths
    starts: tuple[Sequence[int] | None, Sequence[int] | None]
    """Where packed queries and packed keys begin, and where the last ends. It is None for queries with a batch
    axis, and for keys in pages, of which the queries are the last tokens."""
    pages: Sequence[Sequence[int]] = ()
    page_size: int = 1

    def position(self, entry: int) -> int:
        """Return the position of the first query of a sequence among its keys."""
        queries, keys = self.lengths[entry]
        return keys - queries if self.starts[1] is None else 0

    def plan(self, grid: ScoreGrid, group: int, widths: int) -> Plan:
        """Choose the tiles of some of the sequences."""
        if self.starts[1] is None:
            return plan_pages(grid, group, widths, self.page_size)
        return plan_tiles(grid, group, widths)

    def grouped(self, grid: ScoreGrid, group: int, widths: int) -> list[tuple[Entries, Array | None]]:
        """Return which sequences are computed together, and what a device knows of them, as in `_tables`."""
        if grid.library.chunks is not None:  # stacked sequences would not have the chunks of the packed arrays
            return [((entry,), None) for entry in range(len(self.lengths))]
        sizes = HeadSizes(grid.heads, max(1, grid.heads // group), widths)
        if grid.access.waits:
            on_device = group_entries(self.lengths, sizes, tuning.WORK_OF_LAUNCHES)
            return [*zip(on_device, self._tables(grid, on_device), strict=True)]
        parts = []
        for entries in group_entries(self.lengths, sizes):
            # At least 1, since sequences may be empty. Contiguous sequences need no copy, and stay together.
            stacked = tuning.MOST_STACKED // (grid.heads * max(*self.lengths[entries[0]], 1) * widths)
            is_whole = self.starts[1] is None or is_contiguous(entries)
            step = len(entries) if is_whole else max(1, stacked)
            parts += [entries[first : first + step] for first in range(0, len(entries), step)]
        return [(part, None) for part in parts]

    def _tables(self, grid: ScoreGrid, groups: Iterable[Entries]) -> Iterator[Array]:
        """Yield the integers of the sequences of each group, int32 (n, `PAGES` + pages) on the device.

        All of them travel there at once.
        """
        rows = [[*self._rows(entries)] for entries in groups]
        moved = grid.xp.asarray([*chain(*chain(*rows))], dtype=grid.xp.int32, device=grid.device)
        start = 0
        for of_group in rows:
            shape = len(of_group), len(of_group[0])
            yield grid.xp.reshape(moved[start : start + shape[0] * shape[1]], shape)
            start += shape[0] * shape[1]

    def _rows(self, entries: Entries) -> Iterator[list[int]]:
        """Yield the integers of sequences, with as many pages of each."""
        counts = [-(-self.lengths[entry][1] // self.page_size) if self.pages else 0 for entry in entries]
        for entry, count in zip(entries, counts, strict=True):
            begins = [starts[entry] if starts else 0 for starts in self.starts]
            pages = self.pages[entry][:count] if self.pages else ()
            # A sequence without tokens has no page to repeat: it gets page 0, of which its mask hides all keys.
            more = [*pages[-1:], 0][:1] * (max(counts) - count)
            yield [entry, self.position(entry), *self.lengths[entry], *begins, *pages, *more]


NO_PADDING = Work(0, 0)


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


class _Padded(NamedTuple):
    """Sequences that are padded to the same lengths."""

    entries: Entries
    queries: int
    keys: int
    real: Work
    """The work without padding."""
    work: Work


def group_entries(lengths: Lengths, sizes: HeadSizes, most: Work = NO_PADDING) -> list[Entries]:
    """Divide sequences among few groups, each of which is padded to its longest sequence.

    Two groups become one if this adds at most the work `most`, and if the padding of the joined group is at
    most the work of its sequences, or `most` if that is more. With `NO_PADDING`, a group has equal lengths. A
    sequence without queries or without keys is never padded with pairs that masks and biases would be asked
    about.
    """
    by_lengths: dict[tuple[int, int], list[int]] = {}
    for entry, pair in enumerate(lengths):
        by_lengths.setdefault(pair, []).append(entry)
    if most == NO_PADDING:
        return [tuple(entries) for entries in by_lengths.values()]
    groups: list[_Padded] = []
    for queries, keys in sorted(by_lengths, key=_by_size):
        entries = tuple(by_lengths[queries, keys])
        work = sizes.work(len(entries), queries, keys)
        group = _Padded(entries, queries, keys, work, work)
        joined = _joined(groups[-1], group, sizes, most) if groups else None
        groups[-1:] = [*groups[-1:], group] if joined is None else [joined]
    return [tuple(sorted(group.entries)) for group in groups]


def _by_size(lengths: tuple[int, int]) -> tuple[bool, int, int, int]:
    """Return what puts sequences of similar lengths side by side, from small to large."""
    queries, keys = lengths
    return queries > 0 and keys > 0, queries.bit_length(), keys, queries


def _joined(one: _Padded, other: _Padded, sizes: HeadSizes, most: Work) -> _Padded | None:
    """Return two groups as one; None if they are better apart."""
    if (one.queries > 0, one.queries * one.keys > 0) != (other.queries > 0, other.queries * other.keys > 0):
        return None
    entries = (*one.entries, *other.entries)
    queries, keys = max(one.queries, other.queries), max(one.keys, other.keys)
    real, work = (
        Work(*map(sum, zip(one.real, other.real, strict=True))),
        sizes.work(len(entries), queries, keys),
    )
    for least, padded, first, second, limit in zip(real, work, one.work, other.work, most, strict=True):
        if padded - first - second > limit or padded - least > max(least, limit):
            return None
    return _Padded(entries, queries, keys, real, work)
