"""`implementation="native"` on JAX arrays: jax.nn's function computes the contract, or the call is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import override
from peers.judged import record_kernel

from sdpa_xp import biases, masks, scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("whole_precision")
NATIVE = {"implementation": "native"}


def draw(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def grouped(seed: int = 9, **rules: Any) -> list[Any]:
    return draw(seed, (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), **rules)


TABLE = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
MASKS: dict[str, Callable[[Callable[..., Any]], dict[str, Any]]] = {
    "lower right": lambda put: {"attn_mask": masks.causal("lower_right")},
    "a window": lambda put: {"attn_mask": masks.sliding_window(2, 1), "is_causal": True},
    "padding": lambda put: {"attn_mask": masks.padding([3, 7], [5, 2])},
    "documents or a prefix": lambda put: {
        "attn_mask": masks.document([0, 0, 1, 1, 2], [0] * 4 + [1] * 3) | masks.prefix(2)
    },
    "a function": lambda put: {"attn_mask": masks.from_function(lambda b, h, i, j: (i + j + h) % 2 == 0)},
    "ALiBi": lambda put: {"bias": biases.alibi(4), "attn_mask": masks.padding([3, 0])},
    "T5": lambda put: {"bias": biases.relative(put(TABLE), max_distance=6)},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
def test_masks_and_biases(rules: Callable[..., dict[str, Any]], traced: bool) -> None:
    """What NumPy gives, in rows without a key too, which jax.nn gives the mean of the values."""
    of_jax = rules(jnp.asarray)
    call: Callable[..., Any] = lambda *x: scaled_dot_product_attention(*x, **of_jax, **NATIVE)  # noqa: E731
    output = (jax.jit(call) if traced else call)(*grouped())
    expected = scaled_dot_product_attention(*map(np.asarray, grouped()), **rules(np.asarray))
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (4, 5, 1), (3, 1, 5, 7), (2, 1, 4, 1, 7)])
def test_a_batch_of_two_axes(shape: tuple[int, ...]) -> None:
    arrays = draw(4, (2, 3, 4, 5, 8), (3, 2, 7, 8), (2, 1, 2, 7, 8))
    rules = {"bias": jnp.where(draw(5, shape)[0] < 1, draw(6, shape)[0], -math.inf)}
    output = scaled_dot_product_attention(*arrays, **rules, **NATIVE)
    expected = scaled_dot_product_attention(*map(np.asarray, arrays), bias=np.asarray(rules["bias"]))
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


def test_the_smallest_finite_number_does_not_mask() -> None:
    """Beside what is masked, for which jax.nn has a larger number."""
    q, k, v = grouped()
    bias = jnp.full(7, jnp.finfo(jnp.float32).min)
    output = scaled_dot_product_attention(q, k, v, jnp.arange(7) < 3, bias=bias, **NATIVE)
    mean = jnp.repeat(v[:, :, :3].mean(axis=2, keepdims=True), 2, axis=1)
    np.testing.assert_allclose(output, jnp.broadcast_to(mean, q.shape), rtol=0, atol=2e-6)


def test_double_precision() -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match="computes a softmax in float32"):
        scaled_dot_product_attention(*grouped(dtype=jnp.float64), **NATIVE)


def test_no_default_in_a_jit_nor_for_many_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, kernel_calls = grouped(), record_kernel("jax", monkeypatch)
    jax.jit(scaled_dot_product_attention)(*arrays)
    jax.jit(lambda mask: scaled_dot_product_attention(*arrays, mask))(jnp.arange(7) < 5)
    override(monkeypatch, "MOST_JAX_SCORES", 2 * 4 * 5 * 7 - 1)
    scaled_dot_product_attention(*arrays)
    assert not kernel_calls


def test_a_row_whose_scores_are_all_too_small_is_an_empty_one() -> None:
    """-inf by overflow, of which jax.nn makes a NaN."""
    q, k, v = grouped()
    output = scaled_dot_product_attention(jnp.full_like(q, 1e30), jnp.full_like(k, -1e30), v)
    np.testing.assert_array_equal(output, 0)
