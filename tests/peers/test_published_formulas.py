"""Formulas of papers and of codes that are not installed here, written plainly, in float64 NumPy.

Each function is named for its source and states it; ours is computed in float32 and in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from calls import draw
from numpy.typing import NDArray
from peers.judged import CLOSE

from sdpa_xp import biases, dot_product_attention, masks, scaled_dot_product_attention

Floats = NDArray[np.float64]


def wide(*arrays: Any) -> list[Floats]:
    return [np.asarray(x, np.float64) for x in arrays]


def softmax(scores: Floats) -> Floats:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def close(ours: Any, theirs: Any) -> None:
    """Of values of size 1: 2e-6 in float32, as many roundings in float64."""
    bound = CLOSE if ours.dtype == np.float32 else CLOSE * 2.0**-29
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)


def slopes_of_the_authors(heads: int) -> list[float]:
    """`get_slopes` of ofirpress/attention_with_linear_biases: recursive where n is no power of two."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**head for head in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return slopes_of_the_authors(lower) + slopes_of_the_authors(2 * lower)[0::2][: heads - lower]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8, 12, 16, 20, 71])
def test_alibi_slopes(heads: int) -> None:
    expected = np.asarray(slopes_of_the_authors(heads))
    bias = biases.to_array(biases.alibi(heads), (heads, 3, 4))
    i, j = np.arange(3)[:, None], np.arange(4)
    np.testing.assert_allclose(bias, -expected[:, None, None] * abs(i - j), rtol=1e-14)


KEEP = {  # the drawings of the docstring of flash_attn_func
    (2, 5): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    (5, 2): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
}


@pytest.mark.parametrize(("queries", "keys"), KEEP)
def test_causal_of_flash_attention_and_mlx_differs(queries: int, keys: int) -> None:
    """Theirs is aligned lower right, `is_causal` upper left. In flash-attention a row of zeros is 0, too."""
    query, key, value = np.zeros((queries, 2)), np.ones((keys, 2)), np.eye(keys)
    keep = np.asarray(KEEP[queries, keys], np.float64)
    expected = keep / np.maximum(keep.sum(axis=-1, keepdims=True), 1)
    mask = masks.causal("lower_right")
    np.testing.assert_array_equal(masks.to_array(mask, (queries, keys)), keep.astype(bool))
    close(scaled_dot_product_attention(query, key, value, mask), expected)
    upper = np.tril(np.ones((queries, keys)))
    ours = scaled_dot_product_attention(query, key, value, is_causal=True)
    close(ours, upper / upper.sum(axis=-1, keepdims=True))
    assert np.max(np.abs(ours - expected)) > 0.2


def keras(query: Any, key: Any, value: Any, mask: Any = None, bias: Any = 0.0) -> Floats:
    """`keras.ops.dot_product_attention`, (B, T, N, H): masked scores become a large negative number."""
    scores = np.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(query.shape[-1]) + bias
    if mask is not None:
        scores = np.where(mask, scores, -0.7 * np.finfo(np.float32).max)
    return np.einsum("bnts,bsnh->btnh", softmax(scores), value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layout_of_keras(rng: np.random.Generator, dtype: Any) -> None:
    """`mask` and `bias` stay (B, N, T, S); a value may be of another width."""
    query, key, value, bias = draw(rng, (2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 4), (2, 3, 5, 7), dtype=dtype)
    mask = rng.random((2, 1, 5, 7)) < 0.6
    mask[..., 2] = True
    ours = dot_product_attention(query, key, value, bias=bias, mask=mask)
    close(ours, keras(*wide(query, key, value), mask, bias.astype(np.float64)))


def test_row_without_a_key_of_keras_differs(rng: np.random.Generator) -> None:
    """There it is the mean of all values, as in JAX and MLX."""
    query, key, value = draw(rng, (1, 2, 1, 4), (1, 3, 1, 4), (1, 3, 1, 4), dtype=np.float64)
    mask = np.asarray([[True] * 3, [False] * 3])
    theirs, ours = keras(query, key, value, mask), dot_product_attention(query, key, value, mask=mask)
    close(theirs[0, 1], value[0].mean(axis=0))
    assert not ours[0, 1].any()
    close(ours[0, 0], theirs[0, 0])
