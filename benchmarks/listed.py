"""python benchmarks/listed.py: attention over listed keys, beside the plain formula and all pairs.

Prints the milliseconds and the megabytes of one head of width 64, float32 on NumPy, where each query has a list
of 64 keys. The megabytes are the most that NumPy holds in a call, its result included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from linear import megabytes
from measuring import Spread, interleaved

from sdpa_xp import masks, scaled_dot_product_attention

WIDTH, KEYS = 64, 64
LENGTHS = (4096, 32768, 131072)
MOST_ALL_PAIRS, MOST_GATHERED = 4096, 32768
"""The longest call of all pairs, and of the plain formula, which copies L * 64 keys and values at once."""


def gathered(query: Any, key: Any, value: Any, lists: Any) -> Any:
    """Return the output of the plain formula; no list has padding or a number twice."""
    scores = np.einsum("le,lke->lk", query[0], key[0][lists]) / np.float32(8)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("lk,lke->le", weights, value[0][lists])[None]


def main() -> None:
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        query, key, value = rng.standard_normal((3, 1, length, WIDTH), np.float32)
        # Each list has one key of each of 64 parts, so no number stands in it twice.
        lists = np.arange(KEYS) * (length // KEYS) + rng.integers(0, length // KEYS, (length, KEYS))
        runs: dict[str, Callable[[], Any]] = {
            "masks.keys": partial(scaled_dot_product_attention, query, key, value, masks.keys(lists))
        }
        if length <= MOST_GATHERED:
            runs["plain formula"] = partial(gathered, query, key, value, lists)
        if length <= MOST_ALL_PAIRS:
            allowed = np.zeros((length, length), bool)
            np.put_along_axis(allowed, lists, values=True, axis=-1)
            runs["all pairs, a boolean mask"] = partial(
                scaled_dot_product_attention, query, key, value, allowed
            )
        first = runs["masks.keys"]()
        for name, run in runs.items():
            np.testing.assert_allclose(run(), first, atol=1e-5, err_msg=name)
        most = {name: megabytes(run) for name, run in runs.items()}
        for name, times in interleaved(runs, 1.0, least=3).items():
            print(
                f"L = {length}, {name}: ms {Spread.from_numbers(times, 1e3)}; MB {most[name]:.0f}", flush=True
            )


if __name__ == "__main__":
    main()
