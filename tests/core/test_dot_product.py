"""`dot_product_attention`: the names of jax.nn, and messages that keep to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import draw
from internals import reference
from libraries import Library

from sdpa_xp import biases, dot_product_attention, masks

F = np.float32


def swapped(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -2, -3)


def test_every_argument_together(library: Library, rng: np.random.Generator) -> None:
    q, k, v = draw(rng, (2, 7, 4, 8), (2, 11, 2, 8), (2, 11, 2, 5))
    bias, mask = rng.standard_normal((4, 7, 11)).astype(F), rng.random((2, 1, 7, 11)) < 0.8
    output = library.call(
        dot_product_attention,
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        scale=0.3,
        is_causal=True,
        query_seq_lengths=[7, 5],
        key_value_seq_lengths=np.asarray([11, 6], np.int32),
        local_window_size=(4, 1),
    )
    b, i, j = np.ogrid[:2, :7, :11]
    allowed = (j <= i) & (j >= i - 4) & (i < 7 - 2 * b) & (j < 11 - 5 * b)
    allowed = mask & allowed[:, None]
    expected = reference.attention(*map(swapped, (q, k, v)), allowed, bias=bias, scale=0.3)[0]
    np.testing.assert_allclose(library.get(output), swapped(expected), rtol=0, atol=2e-6)


def test_lengths_of_a_call_without_batch(library: Library) -> None:
    """jax.nn takes them with the shape (1,)."""
    x = np.arange(6, dtype=F).reshape(3, 1, 2)
    with library.guard():
        lengths = (2, [2], library.put(np.asarray([2], np.int32)))
    for length in lengths:
        output = library.call(dot_product_attention, 0 * x, x, x, key_value_seq_lengths=length)
        np.testing.assert_array_equal(library.get(output), np.full((3, 1, 2), [1, 2], F))


def test_masks_and_biases_as_values(library: Library) -> None:
    x = np.zeros((1, 3, 1, 2), F)
    value = np.arange(3, dtype=F).reshape(1, 3, 1, 1)
    rules = {"mask": masks.causal(), "bias": biases.alibi([1000.0])}
    output = library.get(library.call(dot_product_attention, x, x, value, **rules))
    np.testing.assert_array_equal(output[0, :, 0, 0], [0, 1, 2])


X = np.ones((2, 3, 2, 4), F)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"key": [1]}, TypeError, "`key` must be a plain array"),
        ({"local_window_size": (1, 2, 3)}, ValueError, r"`local_window_size` must be .* or \(left, right\)"),
        ({"local_window_size": -1}, ValueError, "`local_window_size` must be at least 0"),
        ({"local_window_size": "2"}, TypeError, "`local_window_size` must be an integer"),
        ({"query_seq_lengths": [2, 9]}, ValueError, "`query_seq_lengths` must be at most L"),
        ({"query_seq_lengths": [2.0, 3]}, TypeError, r"`query_seq_lengths\[0\]` must be an integer"),
        ({"key_value_seq_lengths": np.ones(2, F)}, TypeError, "`key_value_seq_lengths` must hold integers"),
        ({"mask": np.ones((3, 3), F)}, TypeError, "`mask` must be boolean"),
        ({"mask": 3}, TypeError, "`mask` must be a mask or a boolean array; got mask=3"),
        ({"bias": masks.causal()}, TypeError, "`bias` must not be a mask.*passed as `attn_mask`"),
        ({"return_residual": True}, ValueError, "`return_residual` must be False.*attention_state"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^dot_product_attention: .*{words}"):
        dot_product_attention(**({"query": X, "key": X, "value": X} | change))
