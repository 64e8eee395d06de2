"""Memory on NumPy, by what it allocates: linear in the length, and no copy of keys for grouped heads."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from sdpa_xp import scaled_dot_product_attention

F = np.float32


def peak(function: Callable[[], object]) -> int:
    """Bytes that `function` holds at most at one time, once everything is imported."""
    function()
    tracemalloc.start()
    function()
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return held


def test_keys_and_values_are_not_repeated_for_groups(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 query heads on one key head: repeated keys would be 64 times the keys."""
    monkeypatch.setattr("sdpa_xp.tiles.SCORES", 2**16)
    q, k = rng.standard_normal((64, 1, 32)).astype(F), rng.standard_normal((1, 4096, 32)).astype(F)
    assert peak(lambda: scaled_dot_product_attention(q, k, k)) < 2 * k.nbytes


@pytest.mark.parametrize("masked", [False, True])
def test_no_score_matrix(rng: np.random.Generator, masked: bool) -> None:
    """4 times the length takes at most 5 times the memory, and less than a bit a pair."""
    peaks = []
    for length in (2048, 8192):
        x = rng.standard_normal((length, 8)).astype(F)
        rules = {"attn_mask": rng.random(length) < 0.5, "is_causal": True} if masked else {}
        peaks.append(peak(lambda x=x, rules=rules: scaled_dot_product_attention(x, x, x, **rules)))
    assert peaks[1] < 5 * peaks[0]
    assert peaks[1] < 8192 * 8192 / 8


def test_many_heads_share_one_budget(rng: np.random.Generator) -> None:
    """The tile shrinks with the number of heads: 512 heads of 128 x 128 make no 32 MB of scores."""
    x = rng.standard_normal((64, 8, 128, 16)).astype(F)
    assert peak(lambda: scaled_dot_product_attention(x, x, x)) < 6 * 4 * 2**22
