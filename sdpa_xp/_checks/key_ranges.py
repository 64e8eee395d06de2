"""Checks of the ranges of keys that states are over: none is delivered twice, and none is lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from sdpa_xp._checks.messages import shown
from sdpa_xp._checks.numbers import check_integer
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

KeyRange: TypeAlias = range | tuple[int, int]
"""The keys from the first number up to the second."""
KeyRanges: TypeAlias = Sequence[KeyRange | Sequence[KeyRange]]
"""For each state one range, or several if the state was merged from others."""


class _Keys(NamedTuple):
    start: int
    stop: int
    state: int
    """The number of the state that is over these keys."""


def check_key_ranges(function: str, value: object, states: int, keys: object) -> None:
    """Check that `value` has the ranges of each state, that none overlap, and that they cover `keys`."""
    total = None if keys is None else check_integer(function, "keys", keys, least=0, most=math.inf)
    if value is None:
        if total is not None:
            rule, hint = "`keys` needs `key_ranges`", "They say which keys each state is over."
            raise ArgumentValueError(function, rule, {"key_ranges": None}, hint)
        return
    if not isinstance(value, Sequence) or len(value) != states:
        rule = "`key_ranges` must have one item for each state"
        length = len(value) if isinstance(value, Sequence) else shown(value)
        raise ArgumentValueError(function, rule, {"key_ranges": length, "states": states})
    ranges = sorted(keys for number, item in enumerate(value) for keys in _ranges(function, number, item))
    furthest = _Keys(0, 0, 0)
    for current in ranges:
        if current.start < furthest.stop:
            rule = "each key must be in one state"
            twice = f"{current.start}:{min(current.stop, furthest.stop)}"
            places = f"states[{furthest.state}] and states[{current.state}]"
            hint = "Merge each state only once."
            raise ArgumentValueError(function, rule, {"keys": f"{twice} in {places}"}, hint)
        furthest = current
    if total is not None:
        _complete(function, ranges, total)


def _complete(function: str, ranges: Iterable[_Keys], total: int) -> None:
    """Check that sorted ranges cover all keys."""
    borders = [_Keys(0, 0, -1), *ranges, _Keys(total, total, -1)]
    if borders[-2].stop > total:
        rule = "no range of keys may end beyond `keys`"
        got = {f"key_ranges[{borders[-2].state}]": f"{borders[-2].start}:{borders[-2].stop}", "keys": total}
        raise ArgumentValueError(function, rule, got)
    lost = [f"{a.stop}:{b.start}" for a, b in itertools.pairwise(borders) if a.stop < b.start]
    if lost:
        rule = f"the states must be over all {total} keys"
        got = {"no state over keys": ", ".join(lost)}
        raise ArgumentValueError(function, rule, got, "A state is missing.")


def _ranges(function: str, number: int, item: object) -> Iterator[_Keys]:
    """Return the ranges of one state that have keys."""
    name = f"key_ranges[{number}]"
    is_one = isinstance(item, range) or (isinstance(item, Sequence) and not _is_nested(item))
    parts = [item] if is_one else item
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        rule = f"`{name}` must be a range of keys, (start, stop), or a list of ranges"
        raise ArgumentTypeError(function, rule, {name: shown(item)})
    for part in parts:
        pair = (part.start, part.stop) if isinstance(part, range) and part.step == 1 else part
        if isinstance(pair, range) or not isinstance(pair, Sequence) or len(pair) != 2:
            rule = f"`{name}` must be a range of keys, (start, stop), or a list of ranges"
            raise ArgumentTypeError(function, rule, {name: repr(item)})
        start, stop = (check_integer(function, name, border, least=0, most=math.inf) for border in pair)
        if stop < start:
            raise ArgumentValueError(function, f"`{name}` must not end before it begins", {name: (start, stop)})
        if start < stop:
            yield _Keys(start, stop, number)


def _is_nested(item: Sequence[object]) -> bool:
    return all(isinstance(part, range | Sequence) for part in item)
