"""`implementation="native"` on each library with a kernel: it computes the contract, or the call is refused.

What one vendor's kernel does in its own way is in test_torch_native.py, test_jax_native.py, test_mlx_native.py.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from calls import attend, draw
from hypothesis import given, settings
from internals import judge, reference, textbook
from libraries import LIBRARIES, Library
from peers.judged import record_kernel

from sdpa_xp import biases, dot_product_attention, masks, scaled_dot_product_attention

F = np.float32
NATIVE = {"implementation": "native"}
GROUPED = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
TWICE = biases.from_function(lambda s, b, h, i, j: s * 2)
VENDORS = ("torch", "jax", "mlx")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in VENDORS])
def vendor(request: pytest.FixtureRequest) -> Library:
    """A library with a kernel, on the CPU."""
    return LIBRARIES[request.param][1]()


def numbers(seed: int, *shapes: tuple[int, ...], dtype: Any = F) -> list[np.ndarray]:
    return draw(np.random.default_rng(seed), *shapes, dtype=dtype)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Query, key and value of random shapes, and rules that every kernel takes."""
    batch = draw(st.sampled_from([(), (2,), (1,), (2, 3)]))
    heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    queries, keys, width = (draw(st.integers(1, 9)) for _ in range(3))
    shapes = [
        (*batch, heads * group, queries, width),
        (*batch[-draw(st.sampled_from([0, 1])) :], heads, keys, width),
        (*batch, heads, keys, width),
    ]
    pairs = [(queries, keys), (keys,), (queries, 1), (heads * group, 1, keys)]
    shape = draw(st.sampled_from([*pairs, (*batch, 1, queries, keys)] if batch else pairs[:1]))
    seed = draw(st.integers(0, 2**16))
    noise, added, scales = numbers(seed + 1, shape, shape, (queries, 1))
    allowed = noise < draw(st.sampled_from([-9.0, 0.0, 0.8]))
    rules: dict[str, Any] = {
        "is_causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.4, 0.0, -0.7, scales])),
    }
    kind = draw(st.sampled_from(["none", "boolean", "floating", "both"]))
    if kind in ("boolean", "both"):
        rules["attn_mask"] = allowed
    if kind == "floating":
        rules["attn_mask"] = np.where(allowed, added, -math.inf).astype(F)
    if kind == "both":
        rules["bias"] = added
    return numbers(seed, *shapes), rules


@settings(max_examples=8)
@given(call=calls())
def test_same_as_the_reference(vendor: Library, call: tuple[list[np.ndarray], dict[str, Any]]) -> None:
    arrays, rules = call
    output = attend(vendor, *arrays, **rules, **NATIVE)
    assert output.dtype == F
    expected = reference.attention(*arrays, **rules)[0]
    assert judge(output, expected, textbook(np, *arrays, **rules), "float32").agrees


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_is_rounded_once(vendor: Library, dtype: str) -> None:
    placed = [vendor.put(x.astype(dtype)) for x in numbers(3, *GROUPED)]
    xp = vendor.xp
    output = scaled_dot_product_attention(*placed, **NATIVE)
    wide = scaled_dot_product_attention(*(xp.astype(x, xp.float32) for x in placed), **NATIVE)
    assert output.dtype == placed[0].dtype
    assert bool(xp.all(output == xp.astype(wide, output.dtype)))


@pytest.mark.parametrize(
    "rules", [{"is_causal": True}, {"attn_mask": np.arange(7) < 5}], ids=["causal", "mask"]
)
def test_nan_in_keys_that_no_query_attends(vendor: Library, rules: dict[str, Any]) -> None:
    query, key, value = numbers(5, *GROUPED)
    cut = key[..., :5, :].copy(), value[..., :5, :].copy()
    expected = scaled_dot_product_attention(query, *cut, is_causal="is_causal" in rules)
    key[..., 5:, :] = value[..., 5:, :] = math.nan
    for library in (vendor, replace(vendor, traces=True)):  # a jit cannot look at the result
        output = attend(library, query, key, value, **rules, **NATIVE)
        np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


def test_a_masked_nan_is_kept_out_of_the_rows_that_do_not_attend_it(vendor: Library) -> None:
    """Kernels let it through, so the portable implementation computes the call again."""
    query, key, value = numbers(6, *GROUPED)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True)
    value[..., 4, :] = math.nan
    output = attend(vendor, query, key, value, is_causal=True)
    np.testing.assert_allclose(output[..., :4, :], expected[..., :4, :], rtol=0, atol=2e-6)
    assert np.isnan(output[..., 4, :]).all()


def derived(vendor: Library, loss: Callable[..., Any], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The gradients of a scalar, by the derivatives of the vendor."""
    placed = [vendor.put(x) for x in arrays]
    if vendor.name == "torch":
        import torch

        leaves = [x.requires_grad_() for x in placed]
        return [x.numpy() for x in torch.autograd.grad(loss(*leaves), leaves)]
    module = importlib.import_module({"jax": "jax", "mlx": "mlx.core"}[vendor.name])
    gradient = module.grad(loss, argnums=(0, 1, 2))
    return [np.asarray(x) for x in (module.jit(gradient) if vendor.name == "jax" else gradient)(*placed)]


def test_gradients(vendor: Library) -> None:
    """Those of a row without a key are 0."""
    width = 8 if vendor.name == "jax" else 6  # JAX's kernel needs E = Ev
    arrays, mask = numbers(7, *GROUPED[:2], (2, 2, 7, width)), np.ones((5, 7), bool)
    mask[1], mask[:, 3] = False, False

    def gradients(implementation: str) -> list[np.ndarray]:
        def loss(*x: Any) -> Any:
            output = scaled_dot_product_attention(*x, vendor.put(mask), implementation=implementation)
            return (output * output).sum()

        return derived(vendor, loss, arrays)

    native = gradients("native")
    for gradient, expected in zip(native, gradients("xp"), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=8e-6)
    assert not native[0][:, :, 1].any()


def test_names_of_jax(vendor: Library) -> None:
    x, y = numbers(2, (2, 5, 4, 8), (2, 7, 2, 8))
    output = vendor.get(vendor.call(dot_product_attention, x, y, y, is_causal=True, **NATIVE))
    np.testing.assert_allclose(output, dot_product_attention(x, y, y, is_causal=True), rtol=0, atol=2e-6)


MASK, BIAS = np.asarray([True, False, True]), np.zeros((3, 3), F)
DEFAULT: list[tuple[dict[str, Any], str]] = [
    ({}, "torch jax mlx"),
    ({"scale": -0.3}, "torch jax mlx"),
    ({"is_causal": True}, "torch jax"),
    ({"attn_mask": MASK}, "torch jax"),
    ({"bias": BIAS}, "torch jax"),
    ({"attn_mask": masks.sliding_window(1, 0)}, "jax"),
    ({"sinks": np.zeros(2, F)}, "mlx"),
    ({"softcap": 2.0}, ""),
    ({"bias": TWICE}, ""),
    ({"implementation": "xp"}, ""),
]
"""Rules of a call, and the vendors whose kernels compute it by default."""


@pytest.mark.parametrize(("rules", "by"), DEFAULT, ids=str)
def test_the_kernel_is_the_default_where_it_pays(
    rules: dict[str, Any], by: str, vendor: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, kernel_calls = numbers(1, *[(1, 2, 3, 4)] * 3), record_kernel(vendor.name, monkeypatch)
    expected = scaled_dot_product_attention(*arrays, **rules)
    for _ in range(2):  # the second time the choice is known
        np.testing.assert_allclose(attend(vendor, *arrays, **rules), expected, rtol=0, atol=2e-6)
    shapes = [tuple(query.shape) for query, *_ in kernel_calls]
    assert shapes == [(1, 2, 3, 4)] * 2 * (vendor.name in by)
