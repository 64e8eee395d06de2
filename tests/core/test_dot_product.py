"""`dot_product_attention`: the names of jax.nn, and messages that keep to them."""

from __future__ import annotations

import numpy as np
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
