"""The numbers that a call holds: widths, sizes, steps, distances, lengths and offsets of masks and biases."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.operands import Initializer

MOST_OF_AN_ARRAY = 4
"""Of an array of integers, as many of the smallest and of the largest numbers count."""


def constants(call: ExportCall) -> list[int]:
    """Return the numbers above 0 at which something changes with a length, without their signs, in order."""
    numbers = {number for value in (*call.masks, *call.biases) for number in _numbers(value)}
    return sorted(numbers - {0})


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, Mask | Bias):
        for name, argument in value.arguments.items():
            if name != "slopes":  # a number of slopes is the number of heads
                yield from _numbers(argument)
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _numbers(element)
    elif isinstance(value, Initializer) and value.numbers.dtype.kind in "iu":
        numbers = np.unique(value.numbers).tolist()
        for number in {*numbers[:MOST_OF_AN_ARRAY], *numbers[-MOST_OF_AN_ARRAY:]}:
            yield abs(number)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield abs(value)
