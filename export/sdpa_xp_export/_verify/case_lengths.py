"""Lengths for the names of a call or of a layer: small ones, those around its numbers, and random ones."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._call.call import ExportCall
from .._call.mask_analysis import CallNumbers, numbers_of
from .._layer.open_lengths import PAST
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
SCORES_AT_ONCE = 2**20
"""The most scores that the reference computes at one time; it holds some 15 arrays of that size."""
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


def shown_lengths(lengths: Mapping[str, int]) -> str:
    """Return lengths as a report shows them; empty if all are fixed."""
    return " ".join(f"{name}={length}" for name, length in lengths.items())


def shown_shapes(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the shapes of arrays as a report shows them: `query[2,8,5,64] key[2,2,9,64]`."""
    return " ".join(f"{name}{list(array.shape)}".replace(", ", ",") for name, array in arrays.items())


def scores_shape(call: ExportCall, lengths: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the scores, (..., Hq, L, S), for these lengths of the names."""
    return tuple(evaluated(length, lengths) for length in call.sizes.scores_shape)


def numbers_within(memory: int | None, size: int) -> int:
    """Return how many numbers of `size` bytes there may be within a limit of memory, or without one."""
    return MOST_NUMBERS if memory is None else min(max(memory // size, FEWEST_NUMBERS), MOST_NUMBERS)


class CallLengths:
    """Chooses lengths for the names around one call: so many queries and keys, and a batch.

    Runs have at most `most` scores, and numbers in an input. If even the smallest run has more, the call
    `is_long`, and runs may have twice as many as that one.
    """

    def __init__(
        self,
        numbers: CallNumbers,
        specs: Mapping[str, TensorSpec],
        call: ExportCall | None = None,
        *,
        thorough: bool = False,
        memory: int | None = None,
    ) -> None:
        self.numbers, self.call, self.thorough = numbers, call, thorough
        self.names = names_in(specs.values())
        self.shapes = [numbers.scores_shape, *(spec.shape for spec in specs.values())]
        self.new, self.past = None, set[str]()
        """The length of the tokens that a cache is given, and the names in the length of its past."""
        if call is not None and call.past_key is not None:
            self.new = call.key.shape[call.length_axis]
            past = addends(str(call.past_key.shape[call.length_axis]))
            self.past = {name for name in past if not name.isdecimal()}
        self.affordable = numbers_within(memory, OF_A_SCORE)
        self.most = min(THOROUGH_NUMBERS if thorough else DEFAULT_NUMBERS, self.affordable)
        if call is not None and call.sums_queries:  # the reference needs all rows at one time
            self.most = min(self.most, SCORES_AT_ONCE)
        least = self.largest(self.least())
        self.is_long = least > self.most
        if self.is_long:  # a call of long fixed lengths is tried nevertheless, with a batch of 2
            self.most = 2 * int(least)

    @staticmethod
    def for_call(call: ExportCall, *, thorough: bool = False, memory: int | None = None) -> CallLengths:
        """Return the lengths of a call that is verified."""
        return CallLengths(numbers_of(call, {}), call.inputs, call, thorough=thorough, memory=memory)

    def __call__(self, queries: int, keys: int, batch: int = 1) -> Lengths:
        """Return lengths for this many queries and keys, as far as their names can be chosen.

        The first name that is neither has the length `batch`, the others have 1 and 2 in turn.
        """
        of_queries, of_keys = self.numbers.scores_shape[-2:]
        wanted = [(of_queries, queries), (of_keys, keys)]
        if self.new is not None:
            wanted.insert(1, (self.new, min(queries, keys)))
        lengths: Lengths = {}
        # The keys come last: with a cache they are a sum, and its past takes what the new tokens leave.
        for length, total in wanted:
            lengths |= shared(length, total, lengths, self.names, self.past)
        rest = [name for name in self.names if name not in lengths]
        lengths |= dict(zip(rest, itertools.chain([batch], itertools.cycle([1, 2])), strict=False))
        return self._with_room({name: lengths[name] for name in self.names})

    def small(self) -> list[Lengths]:
        """Return a few small lengths."""
        return [self._with_room(lengths) for lengths in small_lengths(self.names)]

    def least(self) -> Lengths:
        """Return the smallest lengths."""
        return self._with_room(dict.fromkeys(self.names, 1))

    def _with_room(self, lengths: Lengths) -> Lengths:
        """Make a padded cache long enough for the new tokens and some more."""
        if self.new is not None and self.call is not None and self.call.past_lengths is not None:
            for room in self.past:
                lengths[room] += 3 + evaluated(self.new, lengths)
        return lengths

    @property
    def batch_name(self) -> str | None:
        """The first name that is neither of the queries nor of the keys."""
        of_tokens = (*self.numbers.scores_shape[-2:], self.new or 0)
        used = {part for length in of_tokens for part in addends(str(length))}
        return next((name for name in self.names if name not in used), None)

    @property
    def heads(self) -> int:
        """The heads of all batch entries, with a batch of 1."""
        return math.prod(self.numbers.sizes(self(1, 1))[:-2])

    def affords(self, lengths: Mapping[str, int]) -> bool:
        """Return whether neither the scores nor an input have more than `most` numbers."""
        return self.largest(lengths) <= self.most

    def largest(self, lengths: Mapping[str, int]) -> float:
        """Return how many numbers the largest array has, of the scores and the inputs."""
        known = defaultdict(lambda: 1, lengths)  # a layer may compute lengths of other names
        return max(count_of(shape, known) for shape in self.shapes)

    def around(self, blocks: Sequence[int]) -> Iterator[Lengths]:
        """Yield lengths on each side of the numbers of the call, and of the borders of blocks."""
        numbers = sorted(self.numbers.names)
        for number in numbers if self.thorough else numbers[:MOST_CONSTANTS]:
            for side in (-1, 0, 1, 2, 3) if self.thorough else (0, 2):
                yield self(number + side, number + side)
        for number in numbers[-1:]:  # far beyond the largest, and a few queries of a decoder beside many keys
            yield self(2 * number + 3, 2 * number + 5)
            yield self(3, number + 2)
        for block in blocks:  # one block, one query more, and some blocks with an incomplete one
            for queries, keys in ((block, block + 1), (block + 1, block + 9), (3 * block + 5, 3 * block + 20)):
                yield self(queries, keys)

    def missed(self, number: int, tried: Iterable[Mapping[str, int]]) -> str:
        """Return what a run beyond a number needs; empty if one is beyond it, or if no lengths can be."""
        lengths = self(number + 2, number + 2)
        # With a cache, queries are counted from the first key on, so a few queries exceed a number.
        sides = (-2, -1) if self.new is None else (-1,)
        sizes, others = self.numbers.sizes(lengths), [self.numbers.sizes(other) for other in tried]
        is_missed = any(sizes[side] >= number + 2 > max(other[side] for other in others) for side in sides)
        return self.needs(lengths) if is_missed else ""

    def needs(self, lengths: Lengths) -> str:
        """Return what a run of these lengths needs, and what would try it."""
        *_, queries, keys = sizes = self.numbers.sizes(lengths)
        count = self.largest(lengths)
        if count <= self.most:
            return f"only the {MOST_CONSTANTS} smallest numbers are tried; `thorough=True` tries it"
        shown = f"{count / 1e6:,.0f} million" if count >= 1e6 else f"{count:,.0f}"
        what = "scores" if math.prod(sizes) >= count else "numbers in an input"
        hint = ""
        if count <= min(self.affordable, THOROUGH_NUMBERS):
            hint = "; `thorough=True` tries it"
        elif count <= THOROUGH_NUMBERS:
            hint = "; a larger `memory` tries it" + (
                ", with `thorough=True`" if count > DEFAULT_NUMBERS else ""
            )
        return f"needs {queries:,} queries and {keys:,} keys, {shown} {what}{hint}"

    def at_random(self, rng: np.random.Generator) -> Iterator[Lengths]:
        """Yield random lengths: half of them with as many keys as queries, short ones with a batch."""
        for first, end, count in RANGES if self.names else ():
            for number in range(count * (TIMES_THOROUGH if self.thorough else 1)):
                queries, keys = (_drawn_length(rng, first, end) for _ in range(2))
                keys = keys if number % 2 else queries  # self-attention has as many of both
                batch = int(rng.integers(1, LARGEST_BATCH + 1)) if queries * keys <= PAIRS_OF_A_BATCH else 1
                yield self(queries, keys, batch)


def count_of(shape: SymbolicShape, lengths: Mapping[str, int]) -> float:
    """Return how many numbers an array of `shape` has, as a float: products of huge ints would be slow."""
    return math.prod(float(min(evaluated(length, lengths), 2**63)) for length in shape)


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
        self.blocks, self.thorough, self.names = blocks, thorough, names_in(specs.values())
        self.calls = [CallLengths(call, specs, thorough=thorough, memory=memory) for call in calls]
        others = names_in(spec for name, spec in specs.items() if PAST not in name)
        self.past = [name for name in self.names if name not in others]

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
        wanted = [tuple(lengths.items()) for call in self.calls for lengths in call.around(self.blocks)]
        several = [dict(items) for items in dict.fromkeys(wanted) if items]
        return [lengths for lengths in several if all(call.affords(lengths) for call in self.calls)]

    def longest(self) -> list[Lengths]:
        """Return lengths that are beyond most of the numbers, for runs with large inputs."""
        around = [lengths for lengths in self.around() if any(call.numbers.names for call in self.calls)]
        return around and [max(around, key=lambda lengths: max(call.largest(lengths) for call in self.calls))]

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

    def left_out(self, tried: Sequence[Lengths]) -> list[str]:
        """Return a line for each number that none of the lengths in `tried` goes beyond."""
        numbers = ((call, *named) for call in self.calls for named in sorted(call.numbers.names.items()))
        missed = ((name, call.missed(number, tried)) for call, number, name in numbers)
        return [*dict.fromkeys(f"{name}: {needs}" for name, needs in missed if needs)]

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
