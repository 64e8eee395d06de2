"""Masks as -1e9 added to the scores, as tutorials write them: the same numbers, until a row has no key.

    ahead (4, 4)    0 -1e9 -1e9 -1e9        masks.causal()   x . . .      masks.padding(2)   x x . .
                    0    0 -1e9 -1e9                         x x . .                         x x . .
                    0    0    0 -1e9                         x x x .                         x x . .
                    0    0    0    0                         x x x x                         x x . .

It also prints the memory of 1,000 tokens, with the formula and with the library.

Run it: python examples/large_negative.py [long]; with `long` the library also computes 100,000 tokens, in about
a minute.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_xp import masks, scaled_dot_product_attention

LARGE = -1e9


def main(xp: Any = np) -> None:
    """Run every step with the arrays of `xp`, a module such as numpy, torch or jax.numpy."""
    tokens = np.random.default_rng(5).standard_normal((1, 4, 8), np.float32)
    x = xp.asarray(tokens)
    ahead = np.triu(np.full((4, 4), LARGE, np.float32), k=1)
    padded = np.where(np.arange(4) < 2, 0, LARGE).astype(np.float32)

    assert_near(scaled_dot_product_attention(x, x, x, is_causal=True), formula(tokens, ahead))
    assert_near(scaled_dot_product_attention(x, x, x, masks.padding(2)), formula(tokens, padded))
    causal_and_padding = masks.causal() & masks.padding(2)
    assert_near(scaled_dot_product_attention(x, x, x, causal_and_padding), formula(tokens, ahead + padded))
    print("As long as each row has a key, adding -1e9 gives the same output as a mask.")
    no_key(x, tokens)


def no_key(x: Any, tokens: np.ndarray) -> None:
    """Try a sequence of padding only: -1e9 then masks nothing, and the output is the mean of the padding."""
    by_number = formula(tokens, np.full(4, LARGE, np.float32))
    assert_near(by_number, np.broadcast_to(tokens.mean(axis=-2, keepdims=True), tokens.shape))
    by_mask = np.asarray(scaled_dot_product_attention(x, x, x, masks.padding(0)))
    assert np.all(by_mask == 0)
    # In float32 a score added to -1e9 is lost to rounding.
    assert np.float32(LARGE) + np.float32(30) == np.float32(LARGE)
    with np.errstate(over="ignore"):
        assert np.float16(LARGE) == -np.inf  # so in float16 such a row is NaN
    print("If a row has no key, they differ. Adding -1e9 returns the mean of the padding:")
    print(" ", by_number[0, 0].round(2))
    print("A mask returns 0:")
    print(" ", by_mask[0, 0])
    print("The memory of one call, above its inputs:")


def memory(length: int, *, long: bool = False) -> None:
    """Print the peak memory above query, key and value, for one head of width 64 in float32."""
    x = np.random.default_rng(0).standard_normal((length, 64), np.float32)
    scores = 4 * length**2
    ours = peak(lambda: scaled_dot_product_attention(x, x, x))
    assert ours < scores
    print(f"{length:,} tokens: scores {scores / 1e6:,.0f} MB; sdpa_xp {ours / 1e6:.1f} MB", end="")
    if not long:
        whole = peak(lambda: formula(x, np.float32(0)))
        assert scores < whole
        print(f", the formula {whole / 1e6:.1f} MB", end="")
    print()


def formula(x: np.ndarray, added: Any) -> Any:
    """Return softmax(x x^T / sqrt(d) + added) x."""
    scores = x @ np.swapaxes(x, -1, -2) / np.sqrt(np.float32(x.shape[-1])) + added
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) @ x


def peak(compute: Callable[[], object]) -> int:
    """Return the peak memory of NumPy during the call, in bytes."""
    compute()
    tracemalloc.start()
    compute()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak_bytes


def assert_near(output: Any, expected: Any) -> None:
    """Check that the arrays are equal up to float32 rounding."""
    np.testing.assert_allclose(np.asarray(output), expected, rtol=0, atol=1e-6)


if __name__ == "__main__":
    main()
    memory(1_000)
    if "long" in sys.argv:
        memory(100_000, long=True)
