"""What encodings and rotations refuse, by a message that names function, argument, rule and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries import LIBRARIES

from sdpa_xp import KVCache, PagedKVCache, positional
from sdpa_xp.positional import Rotary

F = np.float32
X = np.ones((2, 3, 5, 8), F)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Rotary(7), ValueError, "Rotary: `width` must be even; got width=7"),
    (lambda: Rotary(0), ValueError, "Rotary: `width` must be at least 2"),
    (lambda: Rotary(8.0), TypeError, "Rotary: `width` must be an integer"),
    (lambda: Rotary(8, base=1.0), ValueError, "Rotary: `base` must be greater than 1; got base=1.0"),
    (lambda: Rotary(8, base="10"), TypeError, "Rotary: `base` must be a real number"),
    (lambda: Rotary(8, interleaved=1), TypeError, "Rotary: `interleaved` must be True or False"),
    (lambda: Rotary(8, scaling=2.0), TypeError, "Rotary: `scaling` must be a Scaling or None; got scaling=2.0"),
    (lambda: Rotary(8).apply([[1.0]], 0), TypeError, "Rotary.apply: `x` must be a plain array"),
    (lambda: Rotary(8).apply(np.ones((2, 8), int), 0), TypeError, "Rotary.apply: `x` must be one of float16"),
    (lambda: Rotary(10).apply(X, 0), ValueError, r"Rotary.apply: `x` must have at least 2 axes, and a width.*rotary.width=10"),
    (lambda: Rotary(8).apply(X, 0, layout="BSHD"), ValueError, "Rotary.apply: `layout` must be '...HLE' or"),
    (lambda: Rotary(8).apply(X, 1.5), TypeError, "Rotary.apply: `positions` must be an integer"),
    (lambda: Rotary(8).apply(X, range(4)), ValueError, r"Rotary.apply: `positions` must have one integer for each token.*L.*\(4,\)"),
    (lambda: Rotary(8).apply(X, [0, 1.0, 2, 3, 4]), TypeError, r"Rotary.apply: `positions\[1\]` must be an integer"),
    (lambda: Rotary(8).apply(X, np.ones(5, bool)), TypeError, "Rotary.apply: `positions` must hold numbers; got positions.dtype=bool"),
    (lambda: Rotary(8).apply(X, range(2**40, 2**40 + 5)), ValueError, "Rotary.apply: `positions` must be at most"),
    (lambda: Rotary(8).cos_sin(4), TypeError, r"Rotary.cos_sin: `positions` must be a range, a list or an array; got positions=4. For the first n .*range\(n\)"),
    (lambda: Rotary(8).cos_sin(range(4), like=np.ones(1, int)), TypeError, "Rotary.cos_sin: `like` must be one of float16"),
    (lambda: positional.LinearScaling(0), ValueError, "LinearScaling: `factor` must be greater than 0"),
    (lambda: positional.NTKScaling(-1), ValueError, "NTKScaling: `factor` must be greater than 0"),
    (lambda: positional.Llama3Scaling(8, 0), ValueError, "Llama3Scaling: `original_length` must be at least 1"),
    (lambda: positional.Llama3Scaling(8, 8, 4, 4), ValueError, "Llama3Scaling: `high_freq_factor` must be greater than 4"),
    (lambda: positional.YaRNScaling(8, 8, beta_fast=1), ValueError, "YaRNScaling: `beta_fast` must be greater than 1"),
    (lambda: positional.YaRNScaling(8, 8, attention_factor=0), ValueError, "YaRNScaling: `attention_factor` must be greater"),
    (lambda: positional.YaRNScaling(8, 8, truncate=0), TypeError, "YaRNScaling: `truncate` must be True or False"),
    (lambda: positional.sinusoidal(4, 5), ValueError, "sinusoidal: `width` must be even"),
    (lambda: positional.sinusoidal(-1, 4), ValueError, "sinusoidal: `positions` must be at least 0"),
    (lambda: positional.sinusoidal(4, 4, base=0), ValueError, "sinusoidal: `base` must be greater than 1"),
    (lambda: positional.sinusoidal(4, 4, like=[1.0]), TypeError, "sinusoidal: `like` must be a plain array"),
    (lambda: positional.learned(np.ones(4), 2), ValueError, "learned: `table` must have 2 axes"),
    (lambda: positional.learned(np.ones((4, 2), int), 2), TypeError, "learned: `table` must be one of float16"),
    (lambda: positional.alibi_slopes(0), ValueError, "alibi_slopes: `heads` must be at least 1"),
    (lambda: KVCache(X, X, rotary=8), TypeError, "KVCache: `rotary` must be a Rotary or None; got rotary=8"),
    (lambda: KVCache(X, X, rotary=Rotary(10)), ValueError, "KVCache: `key` must have at least 2 axes, and a width.*rotary.width=10"),
    (lambda: KVCache(X, X, rotary=Rotary(8)).attend([[1.0]]), TypeError, "KVCache.attend: `query` must be a plain array"),
    (lambda: KVCache(X, X, rotary=Rotary(8)).attend(X.astype(int)), TypeError, "KVCache.attend: `query` must be one of float16"),
    (lambda: PagedKVCache(X, X, [[0]], [1], rotary=Rotary(10)), ValueError, "PagedKVCache: `key_blocks` must have at least 2 axes, and a width"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        call()


@pytest.mark.needs("torch")
def test_positions_of_another_library() -> None:
    positions = LIBRARIES["torch"][1]().put(np.arange(5))
    with pytest.raises(TypeError, match=r"^Rotary.apply: `x` and `positions` must be arrays of one library"):
        Rotary(8).apply(X, positions)
