"""A hint comes where it mends what is wrong, and not where it would mislead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdpa_xp import attention_weights, biases, masks, scaled_dot_product_attention
from sdpa_xp.layers import Linear

F = np.float32
X = np.ones((2, 3, 8), F)
BATCH = np.ones((2, 1, 3, 4))

HINTS: dict[str, tuple[str, Callable[[], Any], Callable[[], Any]]] = {
    "an array where a number belongs": (
        "Convert it with `int`.",
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
        "Call it: causal(...) returns a mask.",
        lambda: scaled_dot_product_attention(X, X, X, masks.causal),
        lambda: scaled_dot_product_attention(X, X, X, len),
    ),
    "a bias that was not called, as a mask": (
        "Call it: alibi(...) returns a bias.",
        lambda: scaled_dot_product_attention(X, X, X, biases.alibi),
        lambda: scaled_dot_product_attention(X, X, X, masks.causal),
    ),
    "a mask of a tokenizer": (
        "counts the 1s of a mask",
        lambda: scaled_dot_product_attention(*[BATCH] * 3, masks.padding(np.ones((2, 3), int))),
        lambda: scaled_dot_product_attention(*[BATCH] * 3, masks.causal(np.ones((2, 3), int))),
    ),
    "a batch without heads": (
        "Inputs of three axes are (heads, length, width).",
        lambda: scaled_dot_product_attention(X, X, X, masks.padding([1, 2])),
        lambda: scaled_dot_product_attention(*[X[:, None]] * 3, masks.padding([1, 2, 3])),
    ),
    "a batch without heads, and a mask of it": (
        "and the mask attn_mask[:, None, None, :].",
        lambda: scaled_dot_product_attention(X, X, X, np.ones((2, 3), bool)),
        lambda: scaled_dot_product_attention(X, X, X, np.ones((4, 3), bool)),
    ),
    "a mask in the place of an array": (
        "Pass it by its keyword: attn_mask=...",
        lambda: scaled_dot_product_attention(X, X, masks.causal()),
        lambda: scaled_dot_product_attention(X, X, biases.alibi(2)),
    ),
    "a bias in the place of an array": (
        "Pass it by its keyword: bias=...",
        lambda: scaled_dot_product_attention(X, biases.alibi(2), X),
        lambda: scaled_dot_product_attention(X, "alibi", X),
    ),
    "a value without a place": (
        "attention_weights takes no value: its third argument is `attn_mask`.",
        lambda: attention_weights(X, X, attn_mask=X),
        lambda: scaled_dot_product_attention(X, X, X, X),
    ),
    "a mask that is added": (
        "Combine masks with `&`, `|` and `~`.",
        lambda: masks.causal() + X,
        lambda: masks.causal() & 1,
    ),
    "a mask with a batch as an array": (
        "Pass a `shape` with the batch: (2, 1, L, S).",
        lambda: masks.to_array(masks.padding([1, 2]), (3, 3)),
        lambda: masks.to_array(masks.padding([1, 2]), (3, 1, 3, 3)),
    ),
    "a mask of tokens for their number": (
        "attn_mask.key_lengths.sum(axis=-1) counts the 1s of a mask.",
        lambda: scaled_dot_product_attention(*[X[None, None]] * 3, masks.padding(np.ones((1, 3), int))),
        lambda: scaled_dot_product_attention(*[X[None, None]] * 3, masks.padding(np.ones((2, 3), int))),
    ),
    "a number for a condition": (
        "Return a condition, such as `kv_idx <= q_idx`.",
        lambda: scaled_dot_product_attention(X, X, X, masks.from_function(lambda b, h, i, j: i - j)),
        lambda: scaled_dot_product_attention(X, X, X, masks.from_function(lambda b, h, i, j: 1)),
    ),
    "a window without a limit": (
        "None is a side without a limit.",
        lambda: masks.sliding_window(2**31 - 1, 0),
        lambda: masks.sliding_window(2.5, 0),
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
