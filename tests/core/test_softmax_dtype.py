"""The dtype that scores are held in, and the scores themselves: what the softmax is taken of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from libraries import Library

from sdpa_xp import attention_scores, attention_state, masks, scaled_dot_product_attention

F = np.float32


@pytest.fixture
def call(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"query": (2, 4, 7, 8), "key": (2, 2, 11, 8), "value": (2, 2, 11, 5)}
    return {name: (10 * rng.standard_normal(shape)).astype(F) for name, shape in shapes.items()}


@pytest.mark.rule("R4")
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


def test_scores_of_2d_and_of_rows_without_a_key(library: Library, call: dict[str, np.ndarray]) -> None:
    q, k = call["query"][0, 0], call["key"][0, 0]
    k[3] = math.nan
    scores = library.get(library.call(attention_scores, q, k, attn_mask=masks.prefix(2) & masks.causal(-1)))
    assert scores.shape == (7, 11)
    np.testing.assert_array_equal(scores[0], -math.inf)
    np.testing.assert_array_equal(scores[:, 2:], -math.inf)
    np.testing.assert_allclose(scores[2, :2], q[2] @ k[:2].T / math.sqrt(8), rtol=1e-5)
