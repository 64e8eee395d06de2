"""The positions of the tokens of a paged cache: of each sequence those of its own, known as Python integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import is_number, library_of
from sdpa_xp._libraries.protocols import Array
from sdpa_xp.caches.positions import factory_like
from sdpa_xp.positional.positions import ArrayFactory, Consecutive
from sdpa_xp.positional.rotation import Positions, Rotation, rotate

Row: TypeAlias = range | tuple[int, ...]
"""The positions of the tokens of one sequence; a range, if they follow one another."""


def check_first_positions(function: str, first: object, lengths: Sequence[int]) -> tuple[Row, ...]:
    """Check the position of the first token: one integer, or one for each sequence."""
    name = "first_position"
    if is_number(first):
        starts = [checks.integer(function, name, first)] * len(lengths)
    else:
        starts = checks.integer_list(function, name, first, least=-checks.LARGEST_INTEGER)
        checks.same_length(function, {"lengths": lengths, name: starts})
    return tuple(range(start, start + length) for start, length in zip(starts, lengths, strict=True))


def check_rows(
    function: str, positions: object, counts: Sequence[int], starts: Sequence[int] | None = None
) -> tuple[Row, ...]:
    """Check the positions of some tokens of each sequence: that of the first, or all, also one row for each.

    With `starts` the tokens are packed, and one list has the positions of all of them.
    """
    if is_number(positions):
        first = checks.integer(function, "positions", positions)
        return tuple(range(first, first + count) for count in counts)
    rows = checks.integers_or_rows(function, "positions", positions)
    if starts is not None and (not rows or isinstance(rows[0], int)):
        checks.row_for_each_sequence(function, [rows], [starts[-1]])
        rows = [rows[first:last] for first, last in pairwise(starts)]
    elif rows and isinstance(rows[0], int):
        rows = [rows] * len(counts)
    checks.row_for_each_sequence(function, rows, counts)
    return tuple(tuple(row) or range(0) for row in rows)


def join_rows(old: Row, new: Row) -> Row:
    """Return the positions of the tokens of a sequence, and of those that are appended to it."""
    if isinstance(old, range) and [*new] == [*range(old.stop, old.stop + len(new))]:
        return range(old.start, old.stop + len(new))
    return (*old, *new) if old else new


def next_position(row: Row) -> int:
    """Return the position after those of a sequence."""
    return row.stop if isinstance(row, range) else row[-1] + 1


def part_of_row(row: Row, start: int, stop: int) -> Row:
    """Return the positions of the tokens from `start` up to `stop`; without one, that of the next is left."""
    if isinstance(row, range):
        return range(row.start + start, row.start + stop)
    if start < stop:
        return row[start:stop]
    following = row[start] if start < len(row) else row[-1] + 1
    return range(following, following)


def last_positions(function: str, row: Row, count: int) -> Row:
    """Return the last positions of a sequence; a range goes on in front of its first token."""
    if isinstance(row, range):
        return range(row.stop - count, row.stop)
    checks.in_cache(function, count, len(row))
    return row[len(row) - count :]


def are_slots(rows: Iterable[Row]) -> bool:
    """Return whether each token stands at the position of its place in its sequence."""
    return all(isinstance(row, range) and row.start == 0 for row in rows)


def as_positions(factory: ArrayFactory, rows: Sequence[Row]) -> Positions:
    """Return rows of one length as positions that a rotation takes."""
    if all(isinstance(row, range) for row in rows):
        return Consecutive([row.start for row in rows if isinstance(row, range)])
    return positions_table(factory, rows)


def rotate_packed(
    rotary: Rotation | None,
    function: str,
    name: str,
    tokens: Array,
    rows: Sequence[Row],
    layout: str,
) -> Array:
    """Rotate packed tokens, which have the positions of all rows one after the other."""
    if rotary is None or not any(rows):
        return tokens
    factory = factory_like(function, tokens)
    with factory.quiet():
        joined, places = rotary._of_packed(function, rows)
    return rotate(joined, function, name, tokens, lambda _: _array(factory, places), layout)


def _array(factory: ArrayFactory, positions: Sequence[object]) -> Array:
    with factory.quiet():
        return factory.xp.asarray(positions, dtype=factory.xp.int32, device=factory.device)


def positions_table(factory: ArrayFactory, rows: Sequence[Row]) -> Array:
    """Return the positions of all sequences as int32, (N, longest); a shorter one repeats its last position."""
    longest = max(map(len, rows))
    if not all(isinstance(row, range) for row in rows):
        return _array(factory, [[*row, *[row[-1] if row else 0] * (longest - len(row))] for row in rows])
    # Two numbers for each sequence, since a step of a decoder comes here with all tokens of all sequences.
    ends = _array(factory, [[row.start, row.stop - 1] for row in rows if isinstance(row, range)])
    with factory.quiet():
        positions = ends[:, :1] + library_of(ends).with_axes(factory.arange(0, longest), 2)
        return factory.xp.where(positions < ends[:, 1:], positions, ends[:, 1:])


def shown_row(row: Row) -> str:
    """Return the positions of a sequence for a notebook."""
    if not row:
        return ""
    return f"{row[0]} to {row[-1]}" if isinstance(row, range) else checks.brief(row)


def shown_rows(rows: Sequence[Row]) -> dict[str, str]:
    """Return the argument of a cache that gives it these positions, for a repr; none if it is the default."""
    if are_slots(rows):
        return {}
    if all(isinstance(row, range) for row in rows):
        starts = tuple(row.start for row in rows if isinstance(row, range))
        return {"first_position": checks.brief(starts)}
    return {"positions": f"<of {len(rows)} sequences>"}
