"""Which rows of a run are compared with the reference: all of a short run, a sample of a long one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export.spec import evaluated

DEFAULT_ROWS, THOROUGH_ROWS = 512, 8192
"""The most rows, of all heads and batch entries together; the reference computes them one by one."""
MOST_SCORES = 2**22
"""The most scores of all compared rows together."""
SCORES_AT_ONCE = 2**20
"""The most scores that the reference computes at one time; it holds some 15 arrays of that size."""
FEWEST = 6
"""The fewest queries that are compared, for any number of heads."""


def sampled_rows(
    call: ExportCall,
    lengths: Mapping[str, int],
    borders: Iterable[int],
    rng: np.random.Generator,
    most: int = DEFAULT_ROWS,
) -> NDArray[np.int64]:
    """Return the indices of the queries to compare, in ascending order, for every head and batch entry.

    If there are too many queries, they are the first two and the last two, the queries next to each of
    `borders`, and some random ones. A border is counted from the first query, from the last, and from the first
    key.
    """
    heads, queries, keys = _sizes(call, lengths)
    count = max(min(most // heads, MOST_SCORES // max(heads * keys, 1)), FEWEST)
    if queries <= count:
        return np.arange(queries)
    rows = [0, queries - 1, 1, queries - 2]
    for border in borders:
        for start in (border, queries - border, border - max(keys - queries, 0)):
            rows += [row for row in (start - 1, start, start + 1) if 0 <= row < queries]
    first = list(dict.fromkeys(rows))
    if len(first) > count - 2:  # the ends, and some of the others
        first = [*first[:4], *rng.choice(first[4:], max(count - 6, 0), replace=False).tolist()]
    rest = np.setdiff1d(np.arange(queries), first)
    drawn = rng.choice(rest, min(max(count - len(first), 0), len(rest)), replace=False)
    return np.sort(np.concatenate([np.asarray(first, np.int64), drawn]))


def pieces(call: ExportCall, lengths: Mapping[str, int], rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cut the compared rows into pieces that the reference computes one after the other."""
    heads, _, keys = _sizes(call, lengths)
    most = max(SCORES_AT_ONCE // max(heads * keys, 1), 1)
    return np.array_split(rows, range(most, len(rows), most))


def _sizes(call: ExportCall, lengths: Mapping[str, int]) -> tuple[int, int, int]:
    """Return the heads of all batch entries, the queries and the keys."""
    *leading, queries, keys = (evaluated(length, lengths) for length in call.sizes.scores_shape)
    return max(math.prod(leading), 1), queries, keys
