"""The dtype that scores are held in, and the scores themselves: what the softmax is taken of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from libraries import Library

from sdpa_xp import attention_scores, attention_state, attention_weights, masks, scaled_dot_product_attention

F = np.float32


@pytest.fixture
def call(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"query": (2, 4, 7, 8), "key": (2, 2, 11, 8), "value": (2, 2, 11, 5)}
    return {name: (10 * rng.standard_normal(shape)).astype(F) for name, shape in shapes.items()}


def softmax(scores: np.ndarray) -> np.ndarray:
    shifted = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e30))
    total = shifted.sum(axis=-1, keepdims=True)
    return shifted / np.where(total == 0, 1, total)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_float64_is_float64_rounded_once(library: Library, call: dict[str, np.ndarray]) -> None:
    library.needs("float64")
    wide = {name: x.astype(np.float64) for name, x in call.items()}
    expected = library.call(attention_state, **wide, is_causal=True)
    with library.guard():
        single, double = (library.put(np.zeros(1, dtype)).dtype for dtype in (F, np.float64))
    for dtype in ("float64", library.xp.float64):
        state = library.call(attention_state, **call, is_causal=True, softmax_dtype=dtype)
        assert (state.output.dtype, state.lse.dtype) == (single, double)
        np.testing.assert_array_equal(library.get(state.output), library.get(expected.output).astype(F))
        np.testing.assert_array_equal(library.get(state.lse), library.get(expected.lse))


def test_what_is_held_anyway_changes_nothing(library: Library, call: dict[str, np.ndarray]) -> None:
    plain = library.get(library.call(scaled_dot_product_attention, **call))
    same = library.get(library.call(scaled_dot_product_attention, **call, softmax_dtype="float32"))
    np.testing.assert_array_equal(plain, same)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_half_bias_and_sinks_fit_a_wider_softmax(library: Library, call: dict[str, np.ndarray]) -> None:
    library.needs("float64")
    extra = {"bias": np.ones((7, 11), F), "sinks": np.ones(4), "scale": np.ones((4, 1, 1), F)}
    output = library.call(scaled_dot_product_attention, **call, **extra, softmax_dtype="float64")
    assert output.dtype == library.put(np.zeros(1, F)).dtype


def test_a_dtype_that_the_library_lacks_is_refused(library: Library, call: dict[str, np.ndarray]) -> None:
    if library.holds("float64"):
        pytest.skip("the library has float64")
    with pytest.raises(ValueError, match="on this device"):
        library.call(scaled_dot_product_attention, **call, softmax_dtype="float64")


@pytest.mark.parametrize("rules", [{}, {"scale": -0.5, "softcap": 3.0}], ids=["plain", "scale, softcap"])
def test_scores(library: Library, call: dict[str, np.ndarray], rules: Any) -> None:
    """scale, softcap, bias, mask, as written here in float64; their softmax is `attention_weights`.

    Scores are up to 400 here, so a rounding of float32 is up to 3e-5.
    """
    bias = np.linspace(-1, 1, 77, dtype=F).reshape(7, 11)
    key = np.repeat(call["key"].astype(np.float64), 2, axis=1)
    scores = call["query"].astype(np.float64) @ np.swapaxes(key, -1, -2) * rules.get("scale", 1 / math.sqrt(8))
    if "softcap" in rules:
        scores = 3 * np.tanh(scores / 3)
    scores = np.where(np.tri(7, 11, k=-2, dtype=bool), scores + bias, -math.inf)
    rules = rules | {"bias": bias, "attn_mask": masks.causal(-2)}
    result = library.get(library.call(attention_scores, call["query"], call["key"], **rules))
    assert result.shape == (2, 4, 7, 11)
    assert result.dtype == F
    np.testing.assert_allclose(result, scores, rtol=2e-6, atol=2e-5)
    weights = library.get(library.call(attention_weights, call["query"], call["key"], **rules))
    np.testing.assert_allclose(weights, softmax(scores), rtol=0, atol=4e-5)


def test_scores_of_2d_and_of_rows_without_a_key(library: Library, call: dict[str, np.ndarray]) -> None:
    q, k = call["query"][0, 0], call["key"][0, 0]
    k[3] = math.nan
    scores = library.get(library.call(attention_scores, q, k, attn_mask=masks.prefix(2) & masks.causal(-1)))
    assert scores.shape == (7, 11)
    np.testing.assert_array_equal(scores[0], -math.inf)
    np.testing.assert_array_equal(scores[:, 2:], -math.inf)
    np.testing.assert_allclose(scores[2, :2], q[2] @ k[:2].T / math.sqrt(8), rtol=1e-5)
