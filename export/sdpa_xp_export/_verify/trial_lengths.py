"""Choose lengths for the names in a call: numbers of queries and keys, and the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export.spec import SymbolicShape, addends, evaluated

Lengths: TypeAlias = dict[str, int]
"""A length by its name."""

MOST_NUMBERS = 2**28
"""Numbers in the inputs and outputs of the smallest run of a call, and in what the reference holds of one query
of each head. Of the other scores it computes a sample, in pieces."""
HELD = 16
"""Arrays that the reference holds for the scores of a piece, with everything that sets the bound."""
OF_A_SCORE, OF_A_NUMBER, FEWEST_NUMBERS = 40, 4, 2**20
"""With a limit of memory, the bytes of it for each score or number in an input of a run, and for each number of
the smallest run, which has no choice of lengths; and how many of these a run may have in any case."""


def small_lengths(names: Sequence[str]) -> Iterator[Lengths]:
    """Yield lengths for these names: different ones, then the other way round, then all 1."""
    several = [length for length, _ in zip(itertools.cycle([2, 5, 9, 7, 3]), names, strict=False)]
    other = several[::-1] if len(names) > 1 else [5] * len(names)
    for lengths in (several, other, [1] * len(names)):
        yield dict(zip(names, lengths, strict=True))


def several_lengths(call: ExportCall) -> Iterator[Lengths]:
    """Yield small lengths for the names in a call."""
    for lengths in small_lengths(call.symbols):
        yield _with_room(call, lengths)


def least_lengths(call: ExportCall) -> Lengths:
    """Return the smallest lengths for the names in a call."""
    return _with_room(call, dict.fromkeys(call.symbols, 1))


def shown_lengths(lengths: Mapping[str, int]) -> str:
    """Return lengths as a report shows them."""
    return " ".join(f"{name}={length}" for name, length in lengths.items()) or "fixed"


def shown_shapes(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the shapes of arrays as a report shows them: `query[2,8,5,64] key[2,2,9,64]`."""
    return " ".join(f"{name}{list(array.shape)}".replace(", ", ",") for name, array in arrays.items())


def numbers_within(memory: int | None, size: int) -> int:
    """Return how many numbers of `size` bytes there may be within a limit of memory, or without one."""
    return MOST_NUMBERS if memory is None else min(max(memory // size, FEWEST_NUMBERS), MOST_NUMBERS)


class LengthsOfCall:
    """Chooses the lengths of a call; runs have at most `most` scores and numbers in an input.

    If even the smallest run has more, runs may have twice as many as that one.
    """

    def __init__(self, call: ExportCall, most: int) -> None:
        self.call, self.most = call, most
        if (least := self.largest(least_lengths(call))) > most:
            self.most = 2 * int(least)  # a call of long fixed lengths is tried nevertheless, with a batch of 2
        past = () if call.past_key is None else addends(str(call.past_key.shape[call.length_axis]))
        self.past = {name for name in past if not name.isdecimal()}

    def __call__(self, queries: int, keys: int, batch: int = 1) -> Lengths:
        """Return lengths for this many queries and keys, as far as their names can be chosen.

        The first name that is neither has the length `batch`, the others have 1 and 2 in turn.
        """
        call = self.call
        new = call.key.shape[call.length_axis]
        wanted = [(call.sizes.queries, queries), (new, min(queries, keys)), (call.sizes.keys, keys)]
        lengths: Lengths = {}
        for length, total in wanted if call.cached else (wanted[0], wanted[2]):
            self._share(length, total, lengths)
        rest = [name for name in call.symbols if name not in lengths]
        lengths |= dict(zip(rest, itertools.chain([batch], itertools.cycle([1, 2])), strict=False))
        return _with_room(call, {name: lengths[name] for name in call.symbols})

    def around_an_empty_past(self) -> Iterator[Lengths]:
        """Yield a prompt without a past, and one new token behind some, if the past has a name."""
        if self.past and self.call.past_lengths is None:
            yield self(4, 4, batch=2)
            yield self(1, 7, batch=2)

    @property
    def batch_name(self) -> str | None:
        """The first name that is neither of the queries nor of the keys."""
        call = self.call
        of_tokens = (call.sizes.queries, call.key.shape[call.length_axis], call.sizes.keys)
        used = {part for length in of_tokens for part in addends(str(length))}
        return next((name for name in call.symbols if name not in used), None)

    @property
    def heads(self) -> int:
        """The heads of all batch entries, with a batch of 1."""
        pairs = self.call.sizes.scores_shape
        lengths = self(1, 1)
        return math.prod(evaluated(length, lengths) for length in pairs[:-2])

    def affords(self, lengths: Mapping[str, int]) -> bool:
        """Return whether neither the scores nor an input have more than `most` numbers."""
        return self.largest(lengths) <= self.most

    def largest(self, lengths: Mapping[str, int]) -> float:
        """Return how many numbers the largest array has, of the scores and the inputs."""
        shapes = [self.call.sizes.scores_shape, *(spec.shape for spec in self.call.inputs.values())]
        return max(_size(shape, lengths) for shape in shapes)

    def _share(self, length: int | str, total: int, lengths: Lengths) -> None:
        """Give the names in a sum lengths that add up to `total`: the first takes what the others leave."""
        parts = addends(str(length))
        free = [name for name in parts if not name.isdecimal() and name not in lengths]
        rest = total - sum(int(part) if part.isdecimal() else lengths.get(part, 0) for part in parts)
        for name in free[1:]:
            lengths[name] = 1
        for name in free[:1]:
            lengths[name] = max(rest - len(free) + 1, 0 if name in self.past else 1)


def check_size(function: str, call: ExportCall, most: int = MOST_NUMBERS) -> None:
    """Refuse a call whose smallest run would hold more than `most` numbers.

    Raises:
        ValueError: With the number.
    """
    lengths, scores = least_lengths(call), call.sizes.scores_shape
    of_output = {"output": (*scores[:-1], call.value.shape[-1]), "lse": scores[:-1]}
    shapes = [spec.shape for spec in call.inputs.values()]
    shapes += [of_output.get(name, scores) for name in call.outputs]
    of_one_query = _size((*scores[:-2], 1, scores[-1]), lengths)
    numbers = sum(_size(shape, lengths) for shape in shapes) + HELD * of_one_query
    if numbers > most:
        rule = f"the inputs and the outputs of `model` must have at most {most} numbers together"
        sizes = " ".join(map(str, (call.query, call.key, call.value)))
        got = {"numbers": f"{numbers:.3g}", "call": sizes[:200]}
        hint = "Export the call once more with a name for the batch or the lengths, and verify that model."
        if most < MOST_NUMBERS:
            hint += " Or pass a larger `memory`."
        raise ArgumentValueError(function, rule, got, hint)


def _size(shape: SymbolicShape, lengths: Mapping[str, int]) -> float:
    """Return how many numbers an array of `shape` has, as a float: products of huge ints would be slow."""
    return math.prod(float(min(evaluated(length, lengths), 2**63)) for length in shape)


def _with_room(call: ExportCall, lengths: Lengths) -> Lengths:
    """Make a padded cache long enough for the new tokens and some more."""
    if call.past_lengths is None or call.past_key is None:
        return lengths
    room, new = (spec.shape[call.length_axis] for spec in (call.past_key, call.key))
    if isinstance(room, str):
        lengths[room] = 3 + lengths[room] + evaluated(new, lengths)
    return lengths
