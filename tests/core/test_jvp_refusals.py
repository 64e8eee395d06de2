"""What `scaled_dot_product_attention_jvp` refuses, by name, before it computes or draws anything."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from libraries import LIBRARIES, Library

import sdpa_xp
from sdpa_xp import biases
from sdpa_xp import scaled_dot_product_attention_jvp as jvp

F = np.float32
X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(F)
NAMES = "`tangents` must have keys among query, key, value"


def test_it_takes_what_the_forward_pass_takes() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (jvp, sdpa_xp.scaled_dot_product_attention))
    mine = {name: p for name, p in ours.items() if name != "tangents"}
    assert mine == {name: p for name, p in theirs.items() if name != "reproducible"}  # not of derivatives


@pytest.mark.parametrize(
    ("tangents", "error", "words"),
    [
        ([X], TypeError, "`tangents` must be a mapping with keys among query, key, value; got tangents=a list of length 1"),
        (X, TypeError, "`tangents` must be a mapping"),
        ({"queries": X}, ValueError, rf"{NAMES}; got key='queries'"),
        ({"bias": X}, ValueError, rf"{NAMES}; got key='bias'"),
        ({"attn_mask": X}, ValueError, rf"{NAMES}; got key='attn_mask'"),
        ({"scale": X}, ValueError, rf"{NAMES}; got"),
        ({0: X}, ValueError, rf"{NAMES}; got key=0"),
        ({"key": X[:1]}, ValueError, r'`tangents\["key"\]` must have the shape of `key`; got .*\(1, 4, 8\)'),
        ({"key": X[0]}, ValueError, r'`tangents\["key"\]` must have the shape of `key`'),
        ({"value": X.astype(np.float64)}, TypeError, r'`value` and `tangents\["value"\]` must have one dtype'),
        ({"value": X > 0}, TypeError, r'`value` and `tangents\["value"\]` must have one dtype'),
        ({"query": X.tolist()}, TypeError, r'`tangents\["query"\]` must be a plain array'),
        ({"query": None}, TypeError, r'`tangents\["query"\]` must be a plain array'),
        ({"query": 1.0}, TypeError, r'`tangents\["query"\]` must be a plain array'),
        ({"query": np.ma.masked_array(X)}, TypeError, r'`tangents\["query"\]` must be a plain array'),
    ],
)  # fmt: skip
def test_tangents(tangents: Any, error: type[Exception], words: str) -> None:
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    with pytest.raises(error, match=f"^scaled_dot_product_attention_jvp: {words}"):
        jvp(X, X, X, tangents, np.ones((4, 4), bool), scale=0.5, dropout_p=0.5, rng=rng)
    assert rng.bit_generator.state == before


def test_tangents_of_a_bias() -> None:
    bias = biases.alibi(np.ones(2, F))
    with pytest.raises(ValueError, match=f"{NAMES}, bias.slopes; got key='bias'"):
        jvp(X, X, X, {"bias": X}, bias=bias)
    with pytest.raises(ValueError, match=r'`tangents\["bias.slopes"\]` must have the shape of `bias.slopes`'):
        jvp(X, X, X, {"bias.slopes": np.ones(3, F)}, bias=bias)


@pytest.mark.needs("torch")
def test_a_tangent_of_another_library() -> None:
    torch = LIBRARIES["torch"][1]()
    with pytest.raises(TypeError, match=r'`query` and `tangents\["query"\]` must be arrays of one library'):
        jvp(X, X, X, {"query": torch.put(X)})


@pytest.mark.needs("array_api_strict")
def test_a_tangent_on_another_device() -> None:
    first, other = (LIBRARIES[f"strict-{device}"][1]() for device in ("CPU_DEVICE", "device1"))
    with pytest.raises(ValueError, match=r'`key` and `tangents\["key"\]` must be on one device'):
        jvp(*(first.put(X) for _ in range(3)), {"key": other.put(X)})


def test_a_function_that_does_more_than_add() -> None:
    words = "the function of `bias` must only add to the score, because its derivative is not known"
    for score_mod in (
        lambda score, *_: score * 2,
        lambda score, b, h, i, j: np.where(j >= 30, score * 2, score),
    ):
        x = np.full((40, 4), 4, F)
        with pytest.raises(ValueError, match=words):
            jvp(x, x, x, {"query": x}, bias=biases.from_function(score_mod))


def test_arrays_in_chunks(library: Library) -> None:
    if not library.lazy:
        pytest.skip("for arrays in chunks")
    words = "arrays in chunks support gradients, but no derivatives along directions"
    with library.guard(), pytest.raises(TypeError, match=words):
        jvp(*(library.put(X) for _ in range(3)), {"query": library.put(X)})
