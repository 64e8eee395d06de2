"""What `scaled_dot_product_attention_vjp` and its pullback refuse, by name."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from libraries import LIBRARIES, Library

import sdpa_xp
from sdpa_xp import biases
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32
X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(F)


def test_it_takes_what_the_forward_pass_takes() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (vjp, sdpa_xp.scaled_dot_product_attention))
    assert dict(ours) == {name: p for name, p in theirs.items() if name != "reproducible"}  # not of derivatives


@pytest.mark.parametrize(
    ("cotangent", "error", "words"),
    [
        (X[:1], ValueError, r"`cotangent` must have the shape of the output; got cotangent.shape=\(1, 4, 8\), output"),
        (X[0], ValueError, r"`cotangent` must have the shape of the output"),
        (X.astype(np.float64), TypeError, "`query` and `cotangent` must have one dtype; got .*float32.*float64"),
        (X > 0, TypeError, "`query` and `cotangent` must have one dtype"),
        (X.tolist(), TypeError, "`cotangent` must be a plain array"),
        (1.0, TypeError, "`cotangent` must be a plain array"),
        (np.ma.masked_array(X), TypeError, "`cotangent` must be a plain array"),
    ],
)  # fmt: skip
def test_cotangents(cotangent: Any, error: type[Exception], words: str) -> None:
    _, pullback = vjp(X, X, X)
    with pytest.raises(error, match=f"^scaled_dot_product_attention_vjp: {words}"):
        pullback(cotangent)
    assert pullback(X).keys() == {"query", "key", "value"}


@pytest.mark.needs("torch")
def test_a_cotangent_of_another_library() -> None:
    torch = LIBRARIES["torch"][1]()
    with pytest.raises(TypeError, match="`query` and `cotangent` must be arrays of one library"):
        vjp(X, X, X)[1](torch.put(X))


@pytest.mark.needs("array_api_strict")
def test_a_cotangent_on_another_device() -> None:
    first, other = (LIBRARIES[f"strict-{device}"][1]() for device in ("CPU_DEVICE", "device1"))
    _, pullback = vjp(*(first.put(X) for _ in range(3)))
    with pytest.raises(ValueError, match=r"`query` and `cotangent` must be on one device.*CPU_DEVICE.*device1"):
        pullback(other.put(X))


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ({"implementation": "native"}, ValueError, "no vendor has a kernel for this function"),
        ({"softcap": -1.0}, ValueError, "`softcap` must be positive"),
        ({"dropout_p": 0.5}, ValueError, "`dropout_p` > 0 needs `rng`"),
        ({"attn_mask": np.ones((4, 4), int)}, TypeError, "`attn_mask` must be boolean"),
    ],
)  # fmt: skip
def test_what_the_forward_pass_refuses(rules: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^scaled_dot_product_attention_vjp: .*{words}"):
        vjp(X, X, X, **rules)


WORDS = "the function of `bias` must only add to the score, because its derivative is not known"
MORE_THAN_A_SUM = {
    "product": lambda score, b, h, i, j: score * 2,
    "softcap": lambda score, b, h, i, j: np.tanh(score),
    "square": lambda score, b, h, i, j: score + 0.01 * score**2,
    "sign": lambda score, b, h, i, j: -score,
    "constant": lambda score, b, h, i, j: 0 * score,
    "of a head alone": lambda score, b, h, i, j: score * (1 + (h == 1)),
}


@pytest.mark.parametrize("score_mod", MORE_THAN_A_SUM.values(), ids=MORE_THAN_A_SUM)
def test_a_function_that_does_more_than_add(score_mod: Any) -> None:
    """Before anything is computed or drawn."""
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    for bias in (biases.from_function(score_mod), biases.alibi(2) + biases.from_function(score_mod)):
        with pytest.raises(
            ValueError, match=f"{WORDS}; got bias=a function that does more. Pass what it adds as an array"
        ):
            vjp(X, X, X, bias=bias, dropout_p=0.5, rng=rng)
    assert rng.bit_generator.state == before


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, b, h, i, j: np.minimum(score, 20.0),
        lambda score, b, h, i, j: np.where(j >= 30, score * 2, score),
    ],
    ids=["above", "far"],
)
def test_a_function_that_does_more_where_it_was_not_tried(score_mod: Any) -> None:
    """The pullback tries it on each tile, so that no wrong gradient comes out."""
    x = np.full((40, 4), 4, F)
    _, pullback = vjp(x, x, x, bias=biases.from_function(score_mod))
    with pytest.raises(ValueError, match=WORDS):
        pullback(x)


def test_a_function_that_cannot_be_tried(library: Library) -> None:
    bias = biases.from_function(lambda score, b, h, i, j: score + 1)
    words = f"{WORDS}; got bias=a function inside a jit or a lazy graph, where it cannot be tried"
    if library.jit is not None:
        with pytest.raises(ValueError, match=words):
            library.call(library.jit(lambda x: vjp(x, x, x, bias=bias)[0]), X)
    else:
        output, _ = library.call(vjp, X, X, X, bias=bias)
        assert output.shape == X.shape


def test_a_function_may_be_a_sum_but_for_roundings() -> None:
    rounded = biases.from_function(
        lambda score, b, h, i, j: (score + 0.1) * np.float32(3) / np.float32(3) - 0.1 * j
    )
    _, pullback = vjp(X, X, X, bias=rounded)
    assert np.isfinite(pullback(X)["query"]).all()
