"""What a call is tried with: lengths around every number of it, sizes of scores, and special inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .._call.call import ExportCall
from .._call.mask_analysis import constants
from .._dtypes.dtype import INTEGERS
from .inputs import LARGE, Extreme, OperandChoice, extremes
from .lengths import SMALL, CallLengths, Lengths, shown_lengths

HUGE = {"float16": 8e3, "bfloat16": 3e4, "float32": 3e4, "float64": 3e4}
"""The size of huge scores by the dtype of the query; they reveal a mask that adds -1e4 instead of -inf."""
LONGEST, THOROUGH_LONGEST = 2053, 4099
"""The longest length if no number of the call needs a longer one. It is prime, so no block ends there."""
LARGE_BATCH = 7
"""The largest batch that a call is tried with by default."""
OTHER_SIZES = ((64, 64), (1024, 1024), (150, 161, LARGE_BATCH), (520, 531, 3))
"""Numbers of queries and keys that are multiples of powers of 2, and large ones with a batch."""
DRAWS_OF_FIXED = 3
"""The number of draws for each size of scores if all lengths of a call are fixed; one if it has many scores."""
FEW_ROWS = 32
"""The rows that are compared at random lengths: a fault at a length concerns most rows."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The lengths of one trial, the size of its scores, its integers, and whether it has a NaN or extremes."""

    lengths: Mapping[str, int]
    size: float = 1.0
    operands: OperandChoice = "drawn"
    nan_in: Literal["", "query", "key", "value"] = ""
    """The input with a NaN: a query, or a key or value that some query attends to."""
    extreme: Extreme = ""
    rows: int | None = None
    """The most rows that are compared, if they are fewer than in other runs."""

    @property
    def shown(self) -> str:
        """The setting as a report shows it."""
        scores = "" if self.size == 1 else ", large scores" if self.size == LARGE else ", huge scores"
        chosen = "" if self.operands == "drawn" else f", {self.operands}"
        nan = f", NaN in a {self.nan_in}" if self.nan_in else ""
        extreme = f", {self.extreme}" if self.extreme else ""
        return f"{shown_lengths(self.lengths)}{scores}{chosen}{nan}{extreme}"


def trial_settings(
    call: ExportCall,
    blocks: Sequence[int] = (),
    cut: int = 0,
    *,
    thorough: bool = False,
    seed: int = 0,
    memory: int | None = None,
) -> list[Setting]:
    """Return the settings for a model that cuts its queries into blocks, and heads of blocks with `cut` scores.

    Each seed adds other random lengths. A limit of memory leaves out long ones.
    """
    chosen = CallLengths.for_call(call, thorough=thorough, memory=memory)
    small = [lengths for lengths in chosen.small() if chosen.affords(lengths)]
    # Primes, which no block and no vector of a kernel divides; then beyond a block of 128 queries.
    many, blocky = (
        lengths if chosen.affords(lengths) else small[0]
        for lengths in (chosen(19, 23, batch=LARGE_BATCH), chosen(130, 141))
    )
    other_sizes = [chosen(*size) for size in OTHER_SIZES]
    at_numbers = [*chosen.around(blocks), *_in_parts(chosen, blocks, cut)]
    ordinary = [*small, *_small(chosen), many, *_around_an_empty_past(chosen), blocky, *other_sizes]
    ordinary += at_numbers
    settings = [Setting(lengths) for lengths in (*ordinary, *_longest(chosen))]
    settings += [Setting(lengths, LARGE) for lengths in (*small, many, blocky, other_sizes[-1])]
    settings += [Setting(lengths, HUGE[call.query.dtype]) for lengths in small[:2]]
    inputs: tuple[Literal["query", "key", "value"], ...] = ("query", "key", "value")
    settings += [Setting(lengths, nan_in=name) for lengths in (many, blocky) for name in inputs]
    # A mask that allows all or nothing, and lengths that are all 0 or whole, may take branches of their own.
    settings += [Setting(lengths, operands=end) for lengths in (small[0], many) for end in _ends(call)]
    beyond = [2 * number + 3 for number in constants(call)[-1:]]  # where a window masks pairs
    wide = (many, blocky, *(chosen(number, number + 2) for number in beyond))
    settings += [Setting(lengths, extreme=extreme) for lengths in wide for extreme in extremes(call)]
    if thorough:
        settings += _thorough(chosen, at_numbers)
    # Not the generator of the inputs, which would then depend on how many lengths were drawn.
    drawn = chosen.at_random(np.random.default_rng([seed, 1]))
    settings += [Setting(lengths, rows=FEW_ROWS) for lengths in drawn]
    return list(_affordable(settings, chosen))


def _around_an_empty_past(chosen: CallLengths) -> Iterator[Lengths]:
    """Yield a prompt without a past, and one new token behind some, if the past has a name."""
    if chosen.past and chosen.call and chosen.call.past_lengths is None:  # a padded cache has its whole length
        yield from (chosen(4, 4, batch=2), chosen(1, 7, batch=2))


def _small(chosen: CallLengths) -> Iterator[Lengths]:
    """Yield each number up to 9 as the number of queries, of keys, of past tokens, and as the batch."""
    for length in range(1, SMALL + 1):
        # All three run through the same numbers, and are never all equal.
        yield chosen(length, (length + 3) % SMALL + 1, batch=2 * length % SMALL + 1)
        if chosen.past:
            yield chosen(1, length + 1, batch=2)


def _ends(call: ExportCall) -> Iterator[OperandChoice]:
    """Yield the ends of the range of the inputs that have some."""
    dtypes = {spec.dtype for spec in call.inputs.values()}
    if dtypes & set(INTEGERS):
        yield from ("least integers", "most integers")
    if "bool" in dtypes:
        yield from ("mask of False", "mask of True")


def _in_parts(chosen: CallLengths, blocks: Sequence[int], cut: int) -> Iterator[Lengths]:
    """Yield lengths with more than `cut` scores in a block, of few queries if these have their own length."""
    queries, keys = chosen.numbers.scores_shape[-2:]
    for block in blocks if cut else ():
        length = cut // block + 9
        yield chosen(length if queries == keys else block + 9, length)


def _longest(chosen: CallLengths) -> Iterator[Lengths]:
    """Yield the longest lengths within the limit, twice as long as any number if possible.

    Some have many queries and many keys, some have many of one and only a few of the other.
    """
    longest = THOROUGH_LONGEST if chosen.thorough else LONGEST
    wanted = max(longest, 2 * max(chosen.numbers.names, default=0) + 7)
    queries, keys = chosen.numbers.scores_shape[-2:]
    if queries != keys:  # else both have one name, and so one length
        yield from (chosen(1, wanted), chosen(3, wanted), chosen(wanted, 3))
    side = math.isqrt(chosen.most // max(chosen.heads, 1))
    # A few keys more than queries: "lower_right" and an offset of 0 are not the same then.
    yield chosen(wanted, wanted + 6) if wanted <= side else chosen(side - 7, side - 1)


def _thorough(chosen: CallLengths, at_numbers: Sequence[Lengths]) -> Iterator[Setting]:
    """Yield every small length, every small batch, more draws, and large scores at the numbers of the call."""
    for length in range(1, 18):
        yield Setting(chosen(length, length))
        yield Setting(chosen(length, 2 * length + 1, batch=1 + length % 9))
        yield Setting(chosen(2 * length + 1, length, batch=1 + length % 9), LARGE)
    yield from (Setting(lengths, size) for size in (1.0, LARGE) for lengths in chosen.small())
    yield from (Setting(lengths, LARGE) for lengths in at_numbers)


def _affordable(settings: Sequence[Setting], chosen: CallLengths) -> Iterator[Setting]:
    """Yield each setting once, except settings with too many numbers.

    A call without names has one setting for each size, which is drawn several times.
    """
    draws = 1 if chosen.is_long else DRAWS_OF_FIXED
    counts: Counter[str] = Counter()
    for setting in settings:
        counts[setting.shown] += 1
        if counts[setting.shown] <= (1 if setting.lengths else draws) and chosen.affords(setting.lengths):
            yield setting


def left_out(
    call: ExportCall, blocks: Sequence[int], settings: Sequence[Setting], memory: int | None = None
) -> tuple[str, ...]:
    """Return a line for each number of the call, and each block, that `settings` do not go beyond.

    A number that no lengths of the call can exceed is not listed.
    """
    chosen, tried = CallLengths.for_call(call, memory=memory), [setting.lengths for setting in settings]
    names = {**chosen.numbers.names} | {block: f"blocks of {block} queries" for block in blocks}
    missed = {name: chosen.missed(number, tried) for number, name in sorted(names.items())}
    if chosen.batch_name and max(lengths[chosen.batch_name] for lengths in tried) < LARGE_BATCH:
        missed[f"a batch of {LARGE_BATCH}"] = chosen.needs(chosen(19, 23, batch=LARGE_BATCH))
    return tuple(f"{name}: {needs}" for name, needs in missed.items() if needs)
