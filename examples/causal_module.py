"""The single-head causal module of the tutorials, as a layer: batch 8, four words, width 1024.

    x (8, 4, 1024) -- query, key, value, each @ (1024, 64) --> (8, 4, 64), word i attends words j <= i
    several heads: several such layers side by side, or one multi-head layer

Run it: python examples/causal_module.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sdpa_xp.layers import Linear, MultiHeadAttention, SingleHeadAttention

BATCH, WORDS, WIDTH, HEADS, HEAD = 8, 4, 1024, 16, 64


def main(xp: Any = np) -> None:
    """Run every step with the arrays of `xp`, a module such as numpy, torch or jax.numpy."""
    rng = np.random.default_rng(0)
    x = xp.asarray(rng.standard_normal((BATCH, WORDS, WIDTH), np.float32))

    head = SingleHeadAttention.init(rng, WIDTH, HEAD, like=x)
    output = head(x, is_causal=True)
    weights = np.asarray(head.weights(x, is_causal=True))
    assert output.shape == (BATCH, WORDS, HEAD)
    assert weights.shape == (BATCH, WORDS, WORDS)
    assert np.all(np.triu(weights, k=1) == 0)
    assert np.allclose(weights.sum(axis=-1), 1)
    assert_near(output[:, 0, :], head.value(x)[:, 0, :])  # the first word attends only to itself

    shorter = x[:, :3, :]  # without its last word, a sentence has the same output for the others
    assert_near(head(shorter, is_causal=True), output[:, :3, :])
    print("Weights of one causal head for the first sentence. Rows are queries, columns are keys:")
    print(weights[0].round(3))
    print("No word attends to a later one, so every weight above the diagonal is 0, and a shorter sentence")
    print("gives the same output for the words that it has.")
    several(x, rng)


def several(x: Any, rng: np.random.Generator) -> None:
    """Check that separate heads, side by side, equal one multi-head layer with their weights stacked."""
    heads = [SingleHeadAttention.init(rng, WIDTH, HEAD, like=x) for _ in range(HEADS)]
    side_by_side = np.concatenate([np.asarray(head(x, is_causal=True)) for head in heads], axis=-1)
    maps = {name: stacked([getattr(head, name) for head in heads]) for name in ("query", "key", "value")}
    layer = MultiHeadAttention(**maps, num_heads=HEADS).to(x)
    assert_near(layer(x, is_causal=True), side_by_side)
    assert side_by_side.shape == (BATCH, WORDS, WIDTH)
    print(
        f"{HEADS} heads one by one give the same output {side_by_side.shape} as one layer with {HEADS} heads."
    )


def stacked(maps: list[Linear]) -> Linear:
    """Stack the weights of all heads into one linear map."""
    weight = np.concatenate([np.asarray(linear.weight) for linear in maps])
    biases = [np.asarray(linear.bias) for linear in maps if linear.bias is not None]
    return Linear(weight, np.concatenate(biases) if biases else None)


def assert_near(output: Any, expected: Any) -> None:
    """Check that the arrays are equal up to float32 rounding."""
    np.testing.assert_allclose(np.asarray(output), np.asarray(expected), rtol=0, atol=2e-5)


if __name__ == "__main__":
    main()
