"""Sequences of unlike lengths on a device: which of them are padded to one length.

On a device each operation costs a launch, however few its numbers are. So sequences share a call if their
padding costs less than the launches of another call. Longer sequences have calls of their own, so that memory
stays linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from sdpa_xp._checks.numbers import Integers
from sdpa_xp._libraries.protocols import Array

Entries: TypeAlias = tuple[int, ...]
"""The numbers of some sequences, in order."""


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


def padded_calls(equal_lengths: Mapping[tuple[int, int], Entries], sizes: HeadSizes) -> list[Entries]:
    """Divide sequences, grouped by their lengths (queries, keys), among few padded calls.

    Two calls become one if this adds at most `WORK_OF_LAUNCHES`, and if the padding of the joined call is at
    most the work of its sequences, or `WORK_OF_LAUNCHES` if that is more. A sequence without queries or without
    keys is never padded with pairs that masks and biases would be asked about.
    """
    calls: list[_Call] = []
    for queries, keys in sorted(equal_lengths, key=_by_size):
        entries = equal_lengths[queries, keys]
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


class PaddedLengths(NamedTuple):
    """The lengths of the batch entries of a grid that are padded to the lengths of the grid."""

    queries: tuple[int, ...]
    """L of each entry."""
    keys: tuple[int, ...]
    """S of each entry."""
    first_positions: tuple[int, ...]
    """The position of the first query of each entry among its keys."""
    query_lengths: Array
    """The same on the device, int32 (n, 1, 1, 1)."""
    key_lengths: Array
    positions: Array

    def lengths(self, letter: str) -> tuple[int, ...]:
        """Return L or S of each entry."""
        return self.queries if letter == "L" else self.keys

    def lower_right(self) -> Integers:
        """Return the shift that puts the last query of each entry at its last key."""
        numbers = zip(self.keys, self.queries, self.first_positions, strict=True)
        shifts = [keys - queries - position for keys, queries, position in numbers]
        if len({*shifts}) == 1:
            return Integers(*[shifts[0]] * 3)
        return Integers(self.key_lengths - self.query_lengths - self.positions, min(shifts), max(shifts))

    def real_keys(self) -> Integers:
        """Return the number of keys of each entry."""
        return Integers(self.key_lengths, min(self.keys), max(self.keys))
