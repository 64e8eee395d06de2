"""Side by side with jax.nn.dot_product_attention: the same keywords go into both."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import reference
from peers.judged import CLOSE, assert_agree, assert_lse_agree

from sdpa_xp import attention_state, dot_product_attention

pytestmark = pytest.mark.usefixtures("whole_precision")
jax_attention = jax.nn.dot_product_attention

B, T, S, N, K, H = 2, 7, 11, 4, 2, 8
LENGTHS = [3, 11]


def draw(rng: np.random.Generator, *, heads: int = K, batch: tuple[int, ...] = (B,)) -> list[Any]:
    shapes = ((*batch, T, N, H), (*batch, S, heads, H), (*batch, S, heads, H))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def turned(x: Any) -> Any:
    """(..., T, N, H) <-> (..., N, T, H)."""
    return np.swapaxes(np.asarray(x), -3, -2)


def agree(results: dict[str, Any], arrays: list[Any], mask: Any = None, **rules: Any) -> None:
    """`results`, (..., T, N, H), by the reference, whose heads come first."""
    inputs = dict(zip(("query", "key", "value"), map(turned, arrays), strict=True))
    inputs = {name: jnp.asarray(x) for name, x in inputs.items()}
    if mask is not None:
        inputs["attn_mask"] = jnp.asarray(mask)
    if "bias" in rules:
        inputs["bias"] = rules.pop("bias")
    assert_agree(jnp, {name: turned(x) for name, x in results.items()}, inputs, jit=jax.jit, **rules)


def both(arrays: list[Any], **rules: Any) -> dict[str, Any]:
    """Each in a jit, since operations that are compiled one by one take longer than all at once."""
    functions = {"jax": jax_attention, "ours": dot_product_attention}
    return {name: jax.jit(partial(function, **rules))(*arrays) for name, function in functions.items()}


I, J = np.arange(T)[:, None], np.arange(S)
KEYS_LEFT = np.asarray(LENGTHS)[:, None, None, None] > J

# The keywords of both, and which pairs (B, N, T, S) they mean.
CALLS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "scale": ({"scale": 0.3}, None),
    "is_causal": ({"is_causal": True}, J <= I),
    "one window": ({"local_window_size": 2}, abs(I - J) <= 2),
    "window": ({"local_window_size": (3, 1)}, (I - 3 <= J) & (J <= I + 1)),
    "causal window": ({"local_window_size": (2, 0), "is_causal": True}, (I - 2 <= J) & (J <= I)),
    "window and causal": ({"local_window_size": (1, 5), "is_causal": True}, (I - 1 <= J) & (J <= I)),
    "lengths of keys": ({"key_value_seq_lengths": jnp.asarray(LENGTHS)}, KEYS_LEFT),
    "lengths and causal": (
        {"key_value_seq_lengths": jnp.asarray(LENGTHS), "is_causal": True},
        KEYS_LEFT & (J <= I),
    ),
}


@pytest.mark.parametrize("heads", [N, 1])
def test_heads(rng: np.random.Generator, heads: int) -> None:
    """As many as the query has, or one; everywhere else two queries share a key."""
    arrays, (rules, allowed) = draw(rng, heads=heads), CALLS["lengths and causal"]
    agree(both(arrays, **rules), arrays, allowed)


@pytest.mark.parametrize(("rules", "allowed"), CALLS.values(), ids=CALLS)
def test_same_call(rng: np.random.Generator, rules: dict[str, Any], allowed: Any) -> None:
    arrays = draw(rng)
    scale = {"scale": rules["scale"]} if "scale" in rules else {}
    agree(both(arrays, **rules), arrays, allowed, **scale)


def test_3d(rng: np.random.Generator) -> None:
    arrays, (rules, allowed) = draw(rng, batch=()), CALLS["causal window"]
    agree(both(arrays, **rules), arrays, allowed)


@pytest.mark.parametrize("shape", [(B, N, T, S), (1, N, 1, S), (B, 1, T, 1), (1, 1, 1, 1)])
def test_bias(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    arrays = draw(rng)
    bias = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    agree(both(arrays, bias=bias), arrays, bias=bias)


@pytest.mark.parametrize("shape", [(B, N, T, S), (B, 1, 1, S), (1, N, T, 1)])
def test_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    """Of all pairs, with a bias, is_causal and lengths beside it; each row keeps a key."""
    arrays = draw(rng)
    mask = rng.random(shape) < 0.5
    mask[..., 0] = True
    bias = jnp.asarray(rng.standard_normal((N, T, S)), jnp.float32)[None]
    rules = {"mask": jnp.asarray(mask), "bias": bias, "is_causal": True}
    results = both(arrays, **rules, key_value_seq_lengths=jnp.asarray(LENGTHS))
    agree(results, arrays, mask & (J <= I) & KEYS_LEFT, bias=bias)


def test_lengths_of_queries(rng: np.random.Generator) -> None:
    """The rows behind are 0 in both."""
    arrays = draw(rng)
    lengths = jnp.asarray([2, 7])
    results = both(arrays, query_seq_lengths=lengths, key_value_seq_lengths=jnp.asarray(LENGTHS))
    agree(results, arrays, KEYS_LEFT & (np.asarray(lengths)[:, None, None, None] > I))
    for result in results.values():
        assert not np.any(np.asarray(result)[0, 2:])


def test_return_residual_is_a_state(rng: np.random.Generator) -> None:
    """theirs is (B, T, N), ours (B, N, T) in both layouts; the natural logarithm in both."""
    arrays = draw(rng)
    output, residual = jax.jit(partial(jax_attention, is_causal=True, return_residual=True))(*arrays)
    state = jax.jit(partial(attention_state, is_causal=True, layout="...LHE"))(*arrays)
    agree({"jax": output, "ours": state.output}, arrays, is_causal=True)
    inputs = dict(zip(("query", "key", "value"), map(turned, arrays), strict=True))
    results = {"jax": np.swapaxes(residual, 1, 2), "ours": state.lse}
    assert_lse_agree(results, inputs, is_causal=True)


def test_lengths_that_are_traced(rng: np.random.Generator) -> None:
    arrays = draw(rng)

    def compiled(function: Any) -> Any:
        def attend(lengths: Any, *arrays: Any) -> Any:
            return function(*arrays, key_value_seq_lengths=lengths, local_window_size=(4, 2))

        return jax.jit(attend)(jnp.asarray(LENGTHS), *arrays)

    results = {"jax": compiled(jax_attention), "ours": compiled(dot_product_attention)}
    agree(results, arrays, KEYS_LEFT & (I - 4 <= J) & (J <= I + 2))


def test_gradients(rng: np.random.Generator) -> None:
    """Of values of size 1, by jax.nn's own in float32."""
    arrays = draw(rng)

    def gradients(function: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            return (function(*arrays, is_causal=True) ** 2).mean()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

    for theirs, ours in zip(gradients(jax_attention), gradients(dot_product_attention), strict=True):
        largest = float(jnp.max(jnp.abs(theirs)))
        assert largest > 0
        np.testing.assert_allclose(ours / largest, theirs / largest, rtol=0, atol=CLOSE)


def test_infinite_bias_differs(rng: np.random.Generator) -> None:
    """A row of -inf is NaN in JAX; here it is a row without a key."""
    arrays = draw(rng)
    bias = jnp.asarray(np.broadcast_to(np.where(I == 3, -math.inf, 0), (1, 1, T, S)), jnp.float32)
    results = both(arrays, bias=bias)
    assert np.all(np.isnan(np.asarray(results["jax"])[:, 3]))
    agree({"ours": results["ours"]}, arrays, bias=bias)


def test_width_of_the_value_differs(rng: np.random.Generator) -> None:
    """JAX wants a value like the key; here Ev need not be E, and axes before the batch may stand."""
    query, key, value = draw(rng)
    ours = jax.jit(dot_product_attention)
    with pytest.raises(ValueError, match="value shape should be"):
        jax_attention(query, key, value[..., :5])
    agree({"ours": ours(query, key, value[..., :5])}, [query, key, value[..., :5]])
    more = [x[None] for x in (query, key, value)]
    with pytest.raises(ValueError, match="too many values to unpack"):
        jax_attention(*more)
    agree({"ours": ours(*more)}, more)


def test_float64_differs(rng: np.random.Generator) -> None:
    """JAX takes the softmax of float64 scores in float32; here it is as exact as float64."""
    numbers = [np.asarray(x, np.float64) * 1.1 for x in draw(rng)]
    expected = np.swapaxes(reference.attention(*(np.swapaxes(x, 1, 2) for x in numbers))[0], 1, 2)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in numbers]
        results = both(arrays)
        assert {name: x.dtype.name for name, x in results.items()} == {"jax": "float64", "ours": "float64"}
        assert np.max(np.abs(np.asarray(results["jax"]) - expected)) > 1e-9
        agree({"ours": results["ours"]}, arrays)
