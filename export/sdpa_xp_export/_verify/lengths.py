"""Lengths for the names of a call or of a layer: small ones, those around its numbers, and random ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._call.call import ExportCall
from .._call.mask_analysis import CallNumbers
from ..spec import SymbolicShape, TensorSpec, addends, evaluated, names_in, shared

Lengths: TypeAlias = dict[str, int]
"""A length by its name."""
MOST_NUMBERS = 2**28
"""Numbers in the inputs and outputs of the smallest run of a call, and in what the reference holds of one query
of each head. Of the other scores it computes a sample, in pieces."""
OF_A_SCORE, OF_A_NUMBER, FEWEST_NUMBERS = 40, 4, 2**20
"""With a limit of memory, the bytes of it for each score or number in an input of a run, and for each number of
the smallest run, which has no choice of lengths; and how many of these a run may have in any case."""
DEFAULT_NUMBERS, THOROUGH_NUMBERS = 9 * 2**22, 9 * 2**24
"""The largest number of scores, or of elements of an input, in one run: 38 and 151 million. A form that keeps
all scores needs about 14 bytes for each of them in float32. A window of 4,096 can be tested with 2 and 8
heads."""
MOST_CONSTANTS = 6
"""The number of constants of a call that get their own lengths by default; the longest length exceeds all."""
SHORTEST = 10
"""All lengths below this one are tried anyway."""
RANGES = ((SHORTEST, 130, 20), (130, 520, 10), (520, 2054, 4))
"""The first length, the end, and how many lengths between them are drawn; short runs take little time."""
TIMES_THOROUGH = 10
"""How many times as many lengths are drawn for a thorough verification."""
LARGEST_BATCH, PAIRS_OF_A_BATCH = 33, 2**14
"""The largest batch, and the most pairs of queries and keys of an entry in a batch."""
DRAWS_FOR_A_LAYER = 6
"""How many lengths are drawn for a layer."""
SMALL, THOROUGH_SMALL = 9, 17
"""Each name of a layer has each length up to this one in some trial; so has each side of a call, by default."""
LONG, THOROUGH_LONG = (33, 130), (33, 130, 300, 1030)
"""Each name of a layer has the first of these lengths alone, and each pair of names has all of them."""


def small_lengths(names: Sequence[str]) -> Iterator[Lengths]:
    """Yield lengths for these names: different ones, then the other way round, then all 1."""
    # Up to five names have different lengths, so that a graph which takes one for another fails.
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


def scores_shape(call: ExportCall, lengths: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the scores, (..., Hq, L, S), for these lengths of the names."""
    return tuple(evaluated(length, lengths) for length in call.sizes.scores_shape)


def numbers_within(memory: int | None, size: int) -> int:
    """Return how many numbers of `size` bytes there may be within a limit of memory, or without one."""
    return MOST_NUMBERS if memory is None else min(max(memory // size, FEWEST_NUMBERS), MOST_NUMBERS)


def most_numbers(memory: int | None, *, thorough: bool) -> int:
    """Return how many scores, and numbers in an input, a run may have."""
    return min(THOROUGH_NUMBERS if thorough else DEFAULT_NUMBERS, numbers_within(memory, OF_A_SCORE))


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
        # The keys come last: with a cache they are a sum, and its past takes what the new tokens leave.
        for length, total in wanted if call.cached else (wanted[0], wanted[2]):
            lengths |= shared(length, total, lengths, call.symbols, self.past)
        rest = [name for name in call.symbols if name not in lengths]
        lengths |= dict(zip(rest, itertools.chain([batch], itertools.cycle([1, 2])), strict=False))
        return _with_room(call, {name: lengths[name] for name in call.symbols})

    def around_an_empty_past(self) -> Iterator[Lengths]:
        """Yield a prompt without a past, and one new token behind some, if the past has a name."""
        if self.past and self.call.past_lengths is None:  # a padded cache has its whole length in any case
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
        return math.prod(scores_shape(self.call, self(1, 1))[:-2])

    def affords(self, lengths: Mapping[str, int]) -> bool:
        """Return whether neither the scores nor an input have more than `most` numbers."""
        return self.largest(lengths) <= self.most

    def largest(self, lengths: Mapping[str, int]) -> float:
        """Return how many numbers the largest array has, of the scores and the inputs."""
        shapes = [self.call.sizes.scores_shape, *(spec.shape for spec in self.call.inputs.values())]
        return max(count_of(shape, lengths) for shape in shapes)


def count_of(shape: SymbolicShape, lengths: Mapping[str, int]) -> float:
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


def lengths_beside(numbers: Sequence[int], *, thorough: bool) -> Iterator[int]:
    """Yield the lengths on each side of numbers, which rise; by default of the first few alone."""
    for number in numbers if thorough else numbers[:MOST_CONSTANTS]:
        yield from (number + side for side in ((-1, 0, 1, 2, 3) if thorough else (0, 2)))


def lengths_of_blocks(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield numbers of queries and keys: one block, one query more, and some blocks with an incomplete one."""
    for block in blocks:
        yield from ((block, block + 1), (block + 1, block + 9), (3 * block + 5, 3 * block + 20))


def needs(queries: int, keys: int, count: float, what: str, affordable: int) -> str:
    """Return what a run with too many scores, or numbers in an input, needs, and what would try it."""
    shown = f"{count / 1e6:,.0f} million" if count >= 1e6 else f"{count:,.0f}"
    hint = ""
    if count <= min(affordable, THOROUGH_NUMBERS):
        hint = "; `thorough=True` tries it"
    elif count <= THOROUGH_NUMBERS:
        hint = "; a larger `memory` tries it" + (", with `thorough=True`" if count > DEFAULT_NUMBERS else "")
    return f"needs {queries:,} queries and {keys:,} keys, {shown} {what}{hint}"


def random_lengths(chosen: LengthsOfCall, rng: np.random.Generator, *, thorough: bool) -> Iterator[Lengths]:
    """Yield random lengths for a call: half of them with as many keys as queries, short ones with a batch."""
    for first, end, count in RANGES:
        for number in range(count * (TIMES_THOROUGH if thorough else 1)):
            queries, keys = (_drawn_length(rng, first, end) for _ in range(2))
            keys = keys if number % 2 else queries  # self-attention has as many of both
            batch = int(rng.integers(1, LARGEST_BATCH + 1)) if queries * keys <= PAIRS_OF_A_BATCH else 1
            yield chosen(queries, keys, batch)


def _drawn_length(rng: np.random.Generator, first: int, end: int) -> int:
    """Return a length from `first` to before `end`: as many below their geometric mean as above it."""
    # The exponential of a logarithm may be rounded up to `end`.
    return min(int(math.exp(rng.uniform(math.log(first), math.log(end)))), end - 1)


class LayerLengths:
    """Chooses lengths for the names in the specs of a layer's inputs, also by the numbers of its calls."""

    def __init__(
        self,
        calls: Sequence[CallNumbers],
        specs: Mapping[str, TensorSpec],
        blocks: Sequence[int],
        *,
        thorough: bool,
        memory: int | None = None,
    ) -> None:
        self.calls, self.blocks, self.thorough = calls, blocks, thorough
        self.names = names_in(specs.values())
        others = names_in(spec for name, spec in specs.items() if "past" not in name)
        self.past = [name for name in self.names if name not in others]
        self.affordable = numbers_within(memory, OF_A_SCORE)
        self.most = most_numbers(memory, thorough=thorough)

    def first(self) -> list[Lengths]:
        """Return a few small lengths, which every layer has to take."""
        return list(small_lengths(self.names))

    def more(self) -> list[Lengths]:
        """Return every small length of each name, long ones, a past of 0, and lengths around each number.

        A layer may refuse some of them.
        """
        several = [*self._at_any_number()]
        return several + [lengths for lengths in self.around() if lengths not in several]

    def around(self) -> list[Lengths]:
        """Return the lengths around the numbers of the calls that there is room for, each once."""
        wanted = [tuple(lengths.items()) for call in self.calls for lengths in self._at_numbers(call)]
        several = [dict(items) for items in dict.fromkeys(wanted) if items]
        return [lengths for lengths in several if self._count(lengths) <= self.most]

    def longest(self) -> list[Lengths]:
        """Return lengths that are beyond most of the numbers, for runs with large inputs."""
        around = [lengths for lengths in self.around() if any(call.names for call in self.calls)]
        return around and [max(around, key=self._count)]

    def at_random(self, accepted: Sequence[Lengths], rng: np.random.Generator) -> Iterator[Lengths]:
        """Yield random lengths: one name at a time, up to the longest that the layer accepted."""
        longest = {name: max(lengths[name] for lengths in accepted) for name in self.names}
        names = [name for name, most in longest.items() if most > SHORTEST]
        for number in range(DRAWS_FOR_A_LAYER * (TIMES_THOROUGH if self.thorough else 1) if names else 0):
            others = {name: int(rng.integers(1, min(most, SHORTEST - 1) + 1)) for name, most in longest.items()}
            name = names[number % len(names)]
            lengths = others | {name: _drawn_length(rng, SHORTEST, longest[name] + 1)}
            if lengths not in accepted:
                yield lengths

    def left_out(self, tried: Sequence[Lengths]) -> Iterator[str]:
        """Yield a line for each number that none of the lengths in `tried` goes beyond."""
        lines: dict[str, None] = {}
        for call in self.calls:
            for number, name in sorted(call.names.items()):
                lengths = call.lengths(number + 2, number + 2, self.names)
                *_, queries, keys = call.sizes(lengths)
                beyond = any(max(call.sizes(other)[-2:]) >= max(queries, keys) for other in tried)
                if max(queries, keys) > number and not beyond:
                    lines[f"{name}: {self._needs(queries, keys, lengths)}"] = None
        yield from lines

    def _at_any_number(self) -> Iterator[Lengths]:
        names, most = self.names, THOROUGH_SMALL if self.thorough else SMALL
        for length in range(most if names else 0):
            # Each name runs through all lengths, and the names are never all the same.
            yield {name: (length + 2 * number) % most + 1 for number, name in enumerate(names)}
        for name in self.past:
            yield dict.fromkeys(names, 2) | {name: 0}
        others = dict(zip(names, itertools.cycle([2, 3]), strict=False))
        alone, *together = THOROUGH_LONG if self.thorough else LONG
        for name in names:
            yield others | {name: alone}
        for length in together:
            for pair in itertools.combinations(names, 2) if len(names) > 1 else [tuple(names)]:
                if pair:
                    yield others | dict.fromkeys(pair, length)

    def _at_numbers(self, call: CallNumbers) -> Iterator[Lengths]:
        numbers = sorted(call.names)
        wanted = [(length, length) for length in lengths_beside(numbers, thorough=self.thorough)]
        for number in numbers[-1:]:  # far beyond the largest, and a few queries of a decoder beside many keys
            wanted += [(2 * number + 3, 2 * number + 5), (3, number + 2)]
        for queries, keys in (*wanted, *lengths_of_blocks(self.blocks)):
            yield call.lengths(queries, keys, self.names)

    def _count(self, lengths: Lengths) -> float:
        return max(call.count(lengths) for call in self.calls)

    def _needs(self, queries: int, keys: int, lengths: Lengths) -> str:
        count = self._count(lengths)
        if count <= self.most:
            return f"only the {MOST_CONSTANTS} smallest numbers are tried; `thorough=True` tries it"
        return needs(queries, keys, count, "scores", self.affordable)
