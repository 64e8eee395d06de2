"""Formulas of papers and of codes that are not installed here, written plainly, in float64 NumPy.

Each function is named for its source and states it; ours is computed in float32 and in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from peers.judged import CLOSE

from sdpa_xp import biases, masks, scaled_dot_product_attention


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
