"""The numbers that a call holds, at which something changes with a length, and which a layer's file keeps.

They are the widths, sizes, steps, distances, lengths and offsets of its masks and biases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.operands import Initializer
from sdpa_xp_export._dtypes.dtype import INTEGERS
from sdpa_xp_export.spec import SymbolicShape, addends

LONGEST_NAME = 1000
"""Characters of a length in a file, which may hold anything."""
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


@dataclass(frozen=True, slots=True)
class CallNumbers:
    """The numbers of a call, the shape of its scores, and the inputs of the layer that its masks use."""

    scores_shape: SymbolicShape
    names: Mapping[int, str]
    """What each number is in the call, such as `sliding_window(left=256)`."""
    operands: tuple[tuple[str, str], ...] = ()
    """Each integer input of the layer that the call uses, and as what: `("lengths", "key_lengths")`."""

    def lengths(self, queries: int, keys: int, names: Sequence[str]) -> dict[str, int]:
        """Return lengths for this many queries and keys, as far as `names` allow it; others are 1."""
        chosen: dict[str, int] = {}
        for length, total in zip(self.scores_shape[-2:], (queries, keys), strict=True):
            parts = addends(str(length))
            free = [part for part in parts if part in names and part not in chosen]
            rest = total - sum(int(part) if part.isdecimal() else chosen.get(part, 0) for part in parts)
            chosen |= dict.fromkeys(free[1:], 1)
            chosen |= {name: max(rest - len(free) + 1, 1) for name in free[:1]}
        return {name: chosen.get(name, 1) for name in names}

    def sizes(self, lengths: Mapping[str, int]) -> list[int]:
        """Return the shape of the scores; a name that no input has counts as 1."""
        return [
            sum(int(part) if part.isdecimal() else lengths.get(part, 1) for part in addends(str(length)))
            for length in self.scores_shape
        ]

    def count(self, lengths: Mapping[str, int]) -> float:
        """Return the number of scores."""
        return math.prod(map(float, self.sizes(lengths)))


def numbers_of(call: ExportCall, sources: Mapping[str, str]) -> CallNumbers:
    """Return the numbers of a call; `sources` maps its inputs to the inputs of the layer that they are."""
    operands = tuple(
        (sources[name], name.rstrip("_0123456789"))
        for name, spec in call.inputs.items()
        if spec.dtype in INTEGERS and name in sources
    )
    return CallNumbers(tuple(call.sizes.scores_shape), constant_names(call), operands)


def numbers_as_json(calls: Iterable[CallNumbers]) -> str:
    """Return the numbers of calls as text, each different call once."""
    written = [
        [[*map(str, call.scores_shape)], {str(n): name for n, name in call.names.items()}, call.operands]
        for call in calls
    ]
    return json.dumps([json.loads(text) for text in dict.fromkeys(map(json.dumps, written))])


def numbers_from_json(text: str) -> list[CallNumbers]:
    """Return what `numbers_as_json` wrote; nothing if it did not write this text."""
    try:
        return [
            CallNumbers(
                tuple(map(str, shape)),
                {int(n): str(name) for n, name in names.items() if 0 < int(n) < 2**31},
                tuple((str(name), str(operand)) for pairs in operands for name, operand in pairs),
            )
            for shape, names, *operands in json.loads(text)
            if len(shape) >= 2 and all(len(str(length)) <= LONGEST_NAME for length in shape)
        ]
    except (AttributeError, RecursionError, TypeError, ValueError):
        return []
