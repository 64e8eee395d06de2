"""Random integers for the operands of masks and biases: lengths, prefixes, offsets and ids."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

OperandChoice: TypeAlias = Literal["drawn", "least integers", "most integers", "mask of False", "mask of True"]
"""Random integers and masks, or all integers at one end of their range, or a boolean mask of one value."""

LENGTHS = ("key_lengths", "query_lengths", "length", "past_lengths")
"""The operands that are numbers of tokens."""
OPERANDS = (*LENGTHS, "query_ids", "key_ids", "offset")
"""The operands that are integers."""
MOST = 2**62
"""The largest document id, if its dtype allows it."""
FAR = 2**29
"""The largest offset and prefix, if the dtype allows it; masks accept no larger offset."""


class TokenCounts(NamedTuple):
    """The tokens of a call in one run."""

    queries: int
    keys: int
    past: int = 0
    """The keys that a padded cache may have before the new ones."""


def drawn_integers(
    operand: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    counts: TokenCounts,
    rng: np.random.Generator,
    choice: OperandChoice = "drawn",
) -> NDArray[Any]:
    """Return random integers that a call accepts for one of `OPERANDS`.

    Of several lengths the first is 0, and the last is the whole length. Ids are 0 to 2 in order. Offsets place
    the first query up to two keys beyond either end.
    """
    if operand in LENGTHS:
        queries, keys, past = counts
        most = {"query_lengths": queries, "past_lengths": past}.get(operand, keys)
        lengths = rng.integers(0, most + 1, shape)
        if lengths.size > 1:
            lengths.flat[0], lengths.flat[-1] = 0, most
        return _clipped(_at_an_end(lengths, 0, FAR if operand == "length" else most, choice), dtype)
    if operand == "offset":
        offsets = rng.integers(-2, max(counts.keys - counts.queries, 0) + 3, shape)
        return _clipped(_at_an_end(offsets, -FAR, FAR, choice), dtype)
    ids = np.sort(rng.integers(0, 3, shape), axis=-1)
    each_its_own = np.broadcast_to(_far_apart(shape[-1], np.iinfo(dtype)), shape)
    return _clipped(_at_an_end(ids, np.iinfo(dtype).min, each_its_own, choice), dtype)


def far_integers(
    shape: tuple[int, ...], dtype: np.dtype[Any], longest: int, rng: np.random.Generator, choice: str
) -> NDArray[Any]:
    """Return random integers of which nothing is known: from -longest to longest, or of any size up to 2**62.

    The two ends of a dtype are left out: to divide by -1 or to negate may end the process there.
    """
    ends = np.iinfo(dtype)
    signed = ends.min < 0
    if choice == "negative integers":
        return _clipped(rng.integers(-max(longest, 2), longest + 1, shape), dtype)
    bits = rng.integers(1, ends.bits - 1, shape)
    bits.flat[0] = bits.flat[-1] = ends.bits - 2  # the first is large, and so is the last
    sizes = rng.integers(2**61, 2**62, shape) >> (62 - bits)
    signs = np.where(signed & (rng.random(shape) < 0.5), -1, 1)
    signs.flat[-1] = -1 if signed else 1
    return _clipped(sizes * signs, dtype)


def _far_apart(count: int, ends: np.iinfo[Any]) -> NDArray[np.int64]:
    """Return large numbers: two that differ by 1, two far below, and so on; narrower dtypes mix them up."""
    pair, second = np.divmod(np.arange(count), 2)
    return np.asarray(min(ends.max, MOST) - pair * 2 ** (ends.bits * 5 // 8) - second)


def _at_an_end(
    drawn: NDArray[np.int64], least: int, most: int | NDArray[np.int64], choice: OperandChoice
) -> NDArray[np.int64]:
    """Return what is drawn, or the least or the most of it everywhere."""
    if "integers" not in choice:
        return drawn
    return np.broadcast_to(np.asarray(least if choice == "least integers" else most), drawn.shape)


def _clipped(drawn: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert integers to `dtype`; those beyond its range go to its ends."""
    ends = np.iinfo(dtype)
    return np.clip(drawn, ends.min, min(ends.max, MOST)).astype(dtype)
