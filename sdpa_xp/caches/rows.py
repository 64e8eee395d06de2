"""The positions of the tokens of a PagedKVCache: a row for each sequence, which is a range or a tuple."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

from .._checks import brief, integers
from .._checks.keywords import LARGEST_INTEGER, check_integer
from .._libraries import is_number, with_axes
from .._libraries.protocols import Array
from ..errors import ArgumentValueError
from ..positional.positions import ArrayFactory, Consecutive
from ..positional.rotation import Positions
from .positions import check_in_cache, check_one_start

Row: TypeAlias = range | tuple[int, ...]
"""The positions of the tokens of one sequence; a range, if they follow one another."""


def start(function: str, first: object, positions: object, lengths: Sequence[int]) -> tuple[Row, ...]:
    """Check the positions of the first tokens of sequences, either all of them or the `first` of each."""
    check_one_start(function, first, positions)
    if positions is not None:
        return check(function, positions, lengths)
    name = "first_position"
    if is_number(first):
        first = [check_integer(function, name, first)] * len(lengths)
    starts = integers.check_integer_list(function, name, first, least=-LARGEST_INTEGER)
    integers.check_same_length(function, {"lengths": lengths, name: starts})
    return tuple(range(start, start + length) for start, length in zip(starts, lengths, strict=True))


def check(
    function: str, positions: object, counts: Sequence[int], starts: Sequence[int] | None = None
) -> tuple[Row, ...]:
    """Check the positions of some tokens of each sequence: that of the first, or all, also one row for each.

    With `starts` the tokens are packed, and one list has the positions of all of them.
    """
    if is_number(positions):
        first = check_integer(function, "positions", positions)
        return tuple(range(first, first + count) for count in counts)
    rows, tokens = integers.check_integers_or_rows(function, "positions", positions), [*counts]
    is_one = not rows or isinstance(rows[0], int)
    if is_one and starts is not None:
        rows, tokens = [rows], [starts[-1]]
    elif is_one and rows:
        rows = [rows] * len(counts)
    if [*map(len, rows)] != tokens:
        rule = "`positions` must have one integer for each token of each sequence"
        raise ArgumentValueError(function, rule, {"integers": [*map(len, rows)], "tokens": tokens})
    if is_one and starts is not None:
        rows = [rows[0][first:last] for first, last in pairwise(starts)]
    return tuple(tuple(row) or range(0) for row in rows)


def joined(old: Row, new: Row) -> Row:
    """Return the positions of the tokens of a sequence, and of those that are appended to it."""
    # A row that goes on stays a range: two numbers, however long a text gets.
    if isinstance(old, range) and [*new] == [*following(old, len(new))]:
        return range(old.start, old.stop + len(new))
    return (*old, *new) if old else new


def following(row: Row, count: int) -> Row:
    """Return the next positions of a sequence, for `count` tokens that are appended."""
    first = row.stop if isinstance(row, range) else row[-1] + 1
    return range(first, first + count)


def part(row: Row, start: int, stop: int) -> Row:
    """Return the positions of the tokens from `start` up to `stop`; without one, that of the next is left."""
    if isinstance(row, range) or start < stop:
        return row[start:stop]
    next_position = row[start] if start < len(row) else row[-1] + 1
    return range(next_position, next_position)


def last(function: str, row: Row, count: int) -> Row:
    """Return the last positions of a sequence; a range goes on in front of its first token."""
    if isinstance(row, range):
        return range(row.stop - count, row.stop)
    check_in_cache(function, count, len(row))
    return row[len(row) - count :]


def to_rotate(factory: ArrayFactory, rows: Sequence[Row]) -> Positions:
    """Return rows of one length as positions that a rotation takes."""
    ranges = [row for row in rows if isinstance(row, range)]
    return Consecutive([row.start for row in ranges]) if len(ranges) == len(rows) else as_array(factory, rows)


def as_array(factory: ArrayFactory, rows: Sequence[Row]) -> Array:
    """Return the positions of all sequences as int32, (N, longest); a shorter one repeats its last position."""
    longest = max(map(len, rows))
    ranges = [row for row in rows if isinstance(row, range)]
    if len(ranges) < len(rows):
        return int32_array(factory, [[*row, *[row[-1] if row else 0] * (longest - len(row))] for row in rows])
    # Two numbers for each sequence, since a step of a decoder comes here with all tokens of all sequences.
    ends = int32_array(factory, [[row.start, row.stop - 1] for row in ranges])
    with factory.computing():
        positions = ends[:, :1] + with_axes(factory.arange(0, longest), 2)
        return factory.xp.where(positions < ends[:, 1:], positions, ends[:, 1:])


def int32_array(factory: ArrayFactory, positions: Sequence[object]) -> Array:
    """Return integers, or rows of integers, as int32."""
    with factory.computing():
        return factory.xp.asarray(positions, dtype=factory.xp.int32, device=factory.device)


def are_slots(rows: Iterable[Row]) -> bool:
    """Return whether each token stands at the position of its place in its sequence."""
    return all(isinstance(row, range) and row.start == 0 for row in rows)


def shown(rows: Sequence[Row]) -> dict[str, str]:
    """Return the argument of a cache that gives it these positions, for a repr; none if it is the default."""
    if are_slots(rows):
        return {}
    if all(isinstance(row, range) for row in rows):
        return {"first_position": brief(tuple(row.start for row in rows if isinstance(row, range)))}
    return {"positions": f"<of {len(rows)} sequences>"}


def shown_row(row: Row) -> str:
    """Return the positions of a sequence for a notebook."""
    if not row:
        return ""
    return f"{row[0]} to {row[-1]}" if isinstance(row, range) else brief(row)
