"""Lengths that each seed draws anew, so that repeated verifications can find a fault at a single length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from sdpa_xp_export._verify.trial_lengths import Lengths, LengthsOfCall

SHORTEST = 10
"""All lengths below this one are tried anyway."""
RANGES = ((SHORTEST, 130, 20), (130, 520, 10), (520, 2054, 4))
"""The first length, the end, and how many lengths between them are drawn; short runs take little time."""
THOROUGH = 10
"""How many times as many lengths are drawn for a thorough verification."""
FEW_ROWS = 32
"""The rows that are compared in these runs: a fault at a length concerns most rows."""
LARGEST_BATCH, PAIRS_OF_A_BATCH = 33, 2**14
"""The largest batch, and the most pairs of queries and keys of an entry in a batch."""
DRAWS_FOR_A_LAYER = 6
"""How many lengths are drawn for a layer."""


def random_lengths(chosen: LengthsOfCall, rng: np.random.Generator, *, thorough: bool) -> Iterator[Lengths]:
    """Yield random lengths for a call: half of them with as many keys as queries, short ones with a batch."""
    for first, end, count in RANGES:
        for number in range(count * (THOROUGH if thorough else 1)):
            queries, keys = (_drawn(rng, first, end) for _ in range(2))
            keys = keys if number % 2 else queries
            batch = int(rng.integers(1, LARGEST_BATCH + 1)) if queries * keys <= PAIRS_OF_A_BATCH else 1
            yield chosen(queries, keys, batch)


def random_lengths_of_layer(
    tried: Sequence[Lengths], rng: np.random.Generator, *, thorough: bool
) -> Iterator[Lengths]:
    """Yield lengths for the names of a layer: one name at a time, up to the longest that the layer accepted."""
    longest = {name: max(lengths[name] for lengths in tried) for lengths in tried[:1] for name in lengths}
    names = [name for name, most in longest.items() if most > SHORTEST]
    for number in range(DRAWS_FOR_A_LAYER * (THOROUGH if thorough else 1) if names else 0):
        others = {name: int(rng.integers(1, min(most, SHORTEST - 1) + 1)) for name, most in longest.items()}
        name = names[number % len(names)]
        yield others | {name: _drawn(rng, SHORTEST, longest[name] + 1)}


def _drawn(rng: np.random.Generator, first: int, end: int) -> int:
    """Return a length from `first` to before `end`: as many below their geometric mean as above it."""
    return min(int(math.exp(rng.uniform(math.log(first), math.log(end)))), end - 1)
