"""The numbers in the masks and biases of a call: only lengths beyond a number can show what it does."""

from __future__ import annotations

from collections.abc import Iterator

from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import Call


def largest(call: Call) -> int:
    """The largest width, size, step, distance or offset of a mask or a bias; 0 where there is none."""
    return max((number for each in (*call.masks, *call.biases) for number in _numbers(each)), default=0)


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, Mask | Bias):
        for name, argument in value.arguments.items():
            if name != "slopes":  # how many heads there are
                yield from _numbers(argument)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield abs(value)
