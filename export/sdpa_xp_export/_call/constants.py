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
    return sorted(constant_names(call))


def constant_names(call: ExportCall) -> dict[int, str]:
    """Return what these numbers are in the call, such as `sliding_window(left=256)`, by the number."""
    names: dict[int, str] = {}
    modifiers: list[Mask | Bias] = [*call.masks, *call.biases]
    for value in modifiers:
        for name, number in _named(value):
            names.setdefault(abs(number), f"{name}={number})")
    names.pop(0, None)
    return names


def _named(value: Mask | Bias) -> Iterator[tuple[str, int]]:
    """Yield each number of a mask or a bias, with `sliding_window(left` and the like as its name."""
    for argument, parts in value.arguments.items():
        for part in parts if isinstance(parts, tuple | list) else (parts,):
            if isinstance(part, Mask | Bias):
                yield from _named(part)
            elif argument != "slopes":  # a number of slopes is the number of heads
                yield from ((f"{value.name}({argument}", number) for number in _numbers(part))


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, tuple | list):
        for element in value:
            yield from _numbers(element)
    elif isinstance(value, Initializer) and value.numbers.dtype.kind in "iu":
        numbers = np.unique(value.numbers).tolist()
        yield from sorted({*numbers[:MOST_OF_AN_ARRAY], *numbers[-MOST_OF_AN_ARRAY:]})
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
