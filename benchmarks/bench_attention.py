"""A few calls for work on their speed: they run in seconds, and compare one change with the next.

`python -m pytest benchmarks/bench_attention.py --benchmark-only --benchmark-autosave`, and after the
change once more with `--benchmark-compare`. The tables of attention.py compare with other libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from benchmarks.cells import CELLS, ONE_QUERY, TINY, Call
from sdpa_xp import KVCache, scaled_dot_product_attention

CALLS = {"tiny": TINY, "one query": ONE_QUERY, **{name: call(1024) for name, call in CELLS.items()}}


@pytest.mark.parametrize("name", ["tiny", "one query", "all pairs", "causal", "grouped heads", "padding array"])
def test_numpy(benchmark: Callable[..., Any], name: str) -> None:
    call = CALLS[name]
    benchmark(scaled_dot_product_attention, *call.arrays(), call.attended(), is_causal=call.is_causal)


def test_numpy_cache(benchmark: Callable[..., Any]) -> None:
    """Decode a token: append its key and value, and attend."""
    query, keys, values = Call(1, 1024, key_heads=2).arrays()
    cache = KVCache(keys, values)

    def step() -> Any:
        return cache.append(keys[..., :1, :], values[..., :1, :]).attend(query)

    assert np.isfinite(benchmark(step)).all()


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("name", ["tiny", "one query", "all pairs"])
def test_torch(benchmark: Callable[..., Any], name: str) -> None:
    import torch

    call = CALLS[name]
    benchmark(scaled_dot_product_attention, *map(torch.from_numpy, call.arrays()), is_causal=call.is_causal)
