"""What a wrong call leaves as it was: nothing is computed or drawn before it is refused.

What such calls say stands in tests/refusals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from internals import override
from libraries import Library

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_jvp as jvp
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

F = np.float32
X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(F)
WRONG: dict[str, dict[str, Any]] = {
    "an option": {"softcap": -1},
    "a mask": {"attn_mask": masks.padding(9)},
    "a bias": {"bias": biases.alibi(3)},
}


@pytest.mark.rule("R7")
@pytest.mark.parametrize("rules", WRONG.values(), ids=WRONG)
def test_nothing_is_computed_before_the_checks(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function of the caller returns is seen when it is called; all else before any work."""
    override(monkeypatch, "attend_portably", lambda *_, **__: pytest.fail("work began"))
    with pytest.raises(ValueError, match=r"`(softcap|attn_mask.key_lengths|bias.slopes)`"):
        scaled_dot_product_attention(X, X, X, **rules)
    with pytest.raises(pytest.fail.Exception, match="work began"):
        scaled_dot_product_attention(X, X, X)


WRONG_DERIVATIVES: dict[str, Any] = {
    "of a function that does more than add": lambda **rules: vjp(
        X, X, X, bias=biases.from_function(lambda score, *_: score * 2), **rules
    ),
    "along a direction of another shape": lambda **rules: jvp(X, X, X, {"key": X[:1]}, **rules),
    "along no direction": lambda **rules: jvp(X, X, X, [X], **rules),
}


@pytest.mark.rule("R7")
@pytest.mark.parametrize("call", WRONG_DERIVATIVES.values(), ids=WRONG_DERIVATIVES)
def test_nothing_is_drawn_before_the_checks(call: Any) -> None:
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    with pytest.raises((TypeError, ValueError)):
        call(dropout_p=0.5, rng=rng)
    assert rng.bit_generator.state == before


def test_a_pullback_works_after_a_wrong_cotangent() -> None:
    _, pullback = vjp(X, X, X)
    with pytest.raises(ValueError, match="shape of the output"):
        pullback(X[:1])
    assert pullback(X).keys() == {"query", "key", "value"}


def test_a_function_that_cannot_be_tried(library: Library) -> None:
    """Whether it only adds to the score is not known inside of a jit."""
    bias = biases.from_function(lambda score, b, h, i, j: score + 1)
    if library.jit is not None:
        with pytest.raises(ValueError, match="it cannot be tried"):
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


def test_arrays_of_booleans_are_no_integers(library: Library) -> None:
    with library.guard():
        flags = library.put(np.asarray([True, False]))
        for write in (masks.padding, masks.prefix, masks.causal, masks.document):
            with pytest.raises(TypeError, match="not booleans"):
                write(flags)
