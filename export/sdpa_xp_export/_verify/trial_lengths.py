"""The lengths that a call is tried at: a few small ones, and those at which the numbers in its masks matter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from sdpa_xp._checks import message
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export.spec import SymbolicShape, addends, evaluated

MOST_SCORES = 2**23
"""A call with a long window is tried beyond the end of the window only up to this many scores."""

MOST_NUMBERS = 2**26
"""Numbers in the inputs, scores and output of a call; the reference then takes some three minutes and 2 GiB."""


def small_lengths(names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield lengths for these names: different ones, then the other way round, then all 1."""
    several = [length for length, _ in zip(itertools.cycle([2, 5, 9, 7, 3]), names, strict=False)]
    other = several[::-1] if len(names) > 1 else [5] * len(names)
    for lengths in (several, other, [1] * len(names)):
        yield dict(zip(names, lengths, strict=True))


def shown_lengths(lengths: Mapping[str, int]) -> str:
    """Return lengths as a report shows them."""
    return " ".join(f"{name}={length}" for name, length in lengths.items()) or "fixed"


def several_lengths(call: ExportCall) -> Iterator[dict[str, int]]:
    """Yield small lengths for the names in a call."""
    for lengths in small_lengths(call.symbols):
        yield _with_room(call, lengths)


def blocks_of_queries(call: ExportCall, rows: int) -> dict[str, int] | None:
    """Return lengths for more queries than `rows` and some more keys; None if the call fixes its queries."""
    queries, keys = call.sizes.queries, call.sizes.keys
    if not isinstance(queries, str):
        return None
    lengths = dict(zip(call.symbols, itertools.cycle([2, 3]), strict=False))
    lengths |= {name: rows + 9 for name in (keys,) if name in lengths}
    lengths |= {name: rows + 3 for name in (queries,) if name in lengths}
    return _with_room(call, lengths)


def beyond_constants(call: ExportCall) -> dict[str, int] | None:
    """Return lengths at which each number in a mask or a bias matters: a window ends, a second chunk begins.

    None if there is no such number, no length to choose, or no room for so many scores.
    """
    largest = _largest_number(call)
    counted = {*addends(str(call.sizes.queries)), *addends(str(call.sizes.keys))}
    free = [name for name in call.symbols if name in counted]
    if not largest or not free:
        return None
    lengths = dict(zip(call.symbols, itertools.cycle([2, 3]), strict=False))
    lengths |= {name: largest + 3 + 2 * number for number, name in enumerate(free)}
    lengths = _with_room(call, lengths)
    scores = math.prod(evaluated(length, lengths) for length in call.sizes.scores_shape)
    return lengths if scores <= MOST_SCORES else None


def check_size(function: str, call: ExportCall, most: int = MOST_NUMBERS) -> None:
    """Refuse a call whose random inputs, scores and output would be of more than `most` numbers.

    Raises:
        ValueError: With the number.
    """
    for lengths in several_lengths(call):
        shapes = [*(spec.shape for spec in call.inputs.values()), call.sizes.scores_shape]
        shapes.append((*call.sizes.scores_shape[:-1], call.value.shape[-1]))
        numbers = sum(_size(shape, lengths) for shape in shapes)
        if numbers > most:
            rule = f"the inputs, the scores and the output of `model` must be at most {most} numbers together"
            sizes = " ".join(map(str, (call.query, call.key, call.value)))
            raise ValueError(message(function, rule, {"numbers": f"{numbers:.3g}", "call": sizes[:200]}))


def _size(shape: SymbolicShape, lengths: Mapping[str, int]) -> float:
    """Return how many numbers an array of `shape` has, as a float: products of huge ints would be slow."""
    return math.prod(float(min(evaluated(length, lengths), 2**63)) for length in shape)


def _with_room(call: ExportCall, lengths: dict[str, int]) -> dict[str, int]:
    """Make a padded cache long enough for the new tokens and some more."""
    if call.past_lengths is None or call.past_key is None:
        return lengths
    room, new = (spec.shape[call.length_axis] for spec in (call.past_key, call.key))
    if isinstance(room, str):
        lengths[room] = 3 + lengths[room] + evaluated(new, lengths)
    return lengths


def _largest_number(call: ExportCall) -> int:
    """Return the largest width, size, step, distance or offset of a mask or a bias; 0 if there is none."""
    return max((number for value in (*call.masks, *call.biases) for number in _numbers(value)), default=0)


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, Mask | Bias):
        for name, argument in value.arguments.items():
            if name != "slopes":  # a number of slopes is the number of heads
                yield from _numbers(argument)
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _numbers(element)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield abs(value)
