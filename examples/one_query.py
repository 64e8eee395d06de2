"""One query over ten keys: the output, the weights, and five extensions that tutorials suggest at the end.

    query (1, 20) -- @ keys (10, 20)^T / sqrt(20), softmax --> weights (1, 10) -- @ values (10, 20) --> (1, 20)

Run it: python examples/one_query.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sdpa_xp import (
    attention_state,
    attention_weights,
    explain,
    masks,
    merge_states,
    scaled_dot_product_attention,
)
from sdpa_xp.layers import Linear, MultiHeadAttention


def main(xp: Any = np) -> None:
    """Run every step with the arrays of `xp`, a module such as numpy, torch or jax.numpy."""
    rng = np.random.default_rng(2017)
    query, key, value = (
        xp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((1, 20), (10, 20), (10, 20))
    )

    output = scaled_dot_product_attention(query, key, value)
    weights = attention_weights(query, key)
    assert output.shape == (1, 20)
    assert weights.shape == (1, 10)
    assert abs(float(weights.sum()) - 1) < 1e-6
    assert_near(output, weights @ value)
    print("One query attends to ten keys. Its weights sum to 1:")
    print(" ", numbers(weights).round(3))
    print("The output is the average of the values with these weights. Five wishes of the tutorial:")

    multi_head(query, key, value)
    masking(query, key, value)
    efficient(query, key, value)
    learnable_scale(query, key, value, xp)
    among_other_layers(query, key, value)


def multi_head(query: Any, key: Any, value: Any) -> None:
    """Wish 1: several heads, each with its own projections."""
    layer = MultiHeadAttention.init(np.random.default_rng(0), 20, num_heads=4, like=query)
    assert layer(query, key, value).shape == (1, 20)
    assert layer.weights(query, key).shape == (4, 1, 10)
    print("1. Several heads:", layer)


def masking(query: Any, key: Any, value: Any) -> None:
    """Wish 2: the last three keys are padding, and removing them gives the same output."""
    masked = scaled_dot_product_attention(query, key, value, masks.prefix(7))
    assert_near(masked, scaled_dot_product_attention(query, key[:7], value[:7]))
    assert float(attention_weights(query, key, attn_mask=masks.prefix(7))[:, 7:].sum()) == 0
    print("2. A mask: with", masks.prefix(7), "the last three keys have weight 0.")


def efficient(query: Any, key: Any, value: Any) -> None:
    """Wish 3: no array of all scores is made, and keys that come in parts give the same output."""
    parts = [attention_state(query, key[keys], value[keys]) for keys in (slice(0, 4), slice(4, 10))]
    assert_near(merge_states(parts).output, scaled_dot_product_attention(query, key, value))
    print("3. Less memory: keys in two parts give the same output. The plan of the call:")
    print("  ", str(explain(query, key, value)).replace("\n", "\n   "))


def learnable_scale(query: Any, key: Any, value: Any, xp: Any) -> None:
    """Wish 4: the scale is a parameter of the layer, one for each head, found among the others by name."""
    layer = MultiHeadAttention.init(np.random.default_rng(0), 20, num_heads=4, like=query)
    learned = replace(layer, scale=xp.full((4,), 20**-0.5, dtype=query.dtype))
    assert "scale" in learned.parameters
    sharper = learned.with_parameters({"scale": learned.parameters["scale"] * 100})
    assert float(sharper.weights(query, key).max()) > float(learned.weights(query, key).max())
    assert learned(query, key, value).shape == sharper(query, key, value).shape
    largest = [float(layer.weights(query, key).max()) for layer in (learned, sharper)]
    print(f"4. A learned scale: times 100, the largest weight goes from {largest[0]:.2f} to {largest[1]:.2f}.")


def among_other_layers(query: Any, key: Any, value: Any) -> None:
    """Wish 5: a layer is a function of arrays, so it composes with other layers."""
    rng = np.random.default_rng(1)
    attention = MultiHeadAttention.init(rng, 20, num_heads=4, like=query)
    embed = Linear(attention.out.weight)
    output = query + attention(embed(query), embed(key), embed(value))
    assert output.shape == query.shape
    print("5. Part of a network: a layer is a function of arrays,", query.shape, "->", output.shape)


def assert_near(output: Any, expected: Any) -> None:
    """Check that the arrays are equal up to float32 rounding."""
    assert float(abs(output - expected).max()) < 1e-5


def numbers(array: Any) -> np.ndarray:
    """Convert an array of any library to NumPy."""
    return np.asarray(array.tolist())


if __name__ == "__main__":
    main()
