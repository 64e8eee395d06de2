"""A hint comes where it mends what is wrong, and not where it would mislead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp.layers import Linear

F = np.float32
X = np.ones((2, 3, 8), F)

HINTS: dict[str, tuple[str, Callable[[], Any], Callable[[], Any]]] = {
    "an array where a number belongs": (
        "Inside a jit it has to be static.",
        lambda: masks.sliding_window(np.ones(1, int), 0),
        lambda: masks.sliding_window(1.5, 0),
    ),
    "conditions joined by words": (
        "`&`, `|` and `~` combine conditions.",
        lambda: scaled_dot_product_attention(X, X, X, bias=biases.from_function(lambda s, b, h, i, j: True)),
        lambda: scaled_dot_product_attention(X, X, X, bias=biases.from_function(lambda s, b, h, i, j: 1)),
    ),
    "documents of the queries alone": (
        "If S is not L, pass the ids of the keys as `key_ids`.",
        lambda: scaled_dot_product_attention(X, X[:, :2], X[:, :2], masks.document([0, 0, 1])),
        lambda: scaled_dot_product_attention(X, X[:, :2], X[:, :2], masks.document([0, 0, 1], [0])),
    ),
    "a function for an array": (
        "`from_function` takes a function of the indices.",
        lambda: masks.causal() & (lambda *_: True),
        lambda: masks.causal() & 1,
    ),
    "a mask that was not called": (
        "Call it: causal(...) returns one.",
        lambda: scaled_dot_product_attention(X, X, X, masks.causal),
        lambda: scaled_dot_product_attention(X, X, X, len),
    ),
    "a window without a limit": (
        "None is a side without a limit.",
        lambda: masks.sliding_window(3, -1),
        lambda: masks.sliding_window(3, 2**40),
    ),
    "integers for a condition": (
        "attn_mask != 0",
        lambda: scaled_dot_product_attention(X, X, X, np.ones((3, 3), int)),
        lambda: scaled_dot_product_attention(X, X, X, np.ones((3, 3), np.complex64)),
    ),
    "names in a file": (
        ", ...",
        lambda: Linear.from_mapping({f"layer{n}.weight": X for n in range(9)}),
        lambda: Linear.from_mapping({f"layer{n}.weight": X for n in range(8)}),
    ),
}


@pytest.mark.parametrize(("hint", "fits", "misleads"), HINTS.values(), ids=HINTS)
def test_hint(hint: str, fits: Callable[[], Any], misleads: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as one:
        fits()
    with pytest.raises((TypeError, ValueError)) as other:
        misleads()
    assert hint in str(one.value)
    assert hint not in str(other.value)
