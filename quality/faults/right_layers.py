"""Layers whose graphs are right, with sums of each kind: of tokens, widths, equal terms and differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_xp import scaled_dot_product_attention as attention
from sdpa_xp.layers import MultiHeadAttention
from sdpa_xp_export import TensorSpec

RNG = np.random.default_rng(0)
WEIGHTS = RNG.standard_normal((4, 16, 16), np.float32) / 4
TABLE = RNG.standard_normal((8, 16), np.float32)
LIKE = np.ones(1, np.float32)
HEADS = MultiHeadAttention.init(RNG, 16, num_heads=2, like=LIKE)
WIDE = MultiHeadAttention.init(RNG, 128, num_heads=4, like=LIKE)
X = TensorSpec("float32", ("B", "L", 16))
TOKENS = TensorSpec("bool", ("B", "L"))


def of_two_kinds(mask: Any) -> Any:
    """Tokens of two kinds, whose sums have equal terms."""
    xp = mask.__array_namespace__()
    return xp.astype(mask, xp.float32)[..., None] * WEIGHTS[0, 0] + WEIGHTS[0, 1]


def causal(x: Any) -> Any:
    return attention(x, x, x, is_causal=True)


def embedded(ids: Any) -> Any:
    rows = ids.__array_namespace__().take(TABLE, ids.__array_namespace__().reshape(ids, (-1,)), axis=0)
    return causal(ids.__array_namespace__().reshape(rows, (*ids.shape, 16)))


def constant(x: Any) -> Any:
    """Every value is one number."""
    return attention(x, x, x.__array_namespace__().ones_like(x) * WEIGHTS[0, 0], is_causal=True)


def normed(x: Any) -> Any:
    xp = x.__array_namespace__()
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    return centred / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)


def block(x: Any) -> Any:
    x = x + HEADS(normed(x))
    hidden = normed(x) @ WEIGHTS[1]
    xp = x.__array_namespace__()
    return x + xp.where(hidden > 0, hidden, xp.zeros_like(hidden)) @ WEIGHTS[2]


def softmax_of_tokens(x: Any) -> Any:
    xp = x.__array_namespace__()
    exponentials = xp.exp(x - xp.max(x, axis=1, keepdims=True))
    return exponentials / xp.sum(exponentials, axis=1, keepdims=True)


def reduced(name: str, **options: Any) -> Callable[[Any], Any]:
    """A sum, a mean or another reduction of the namespace."""
    return lambda x: getattr(x.__array_namespace__(), name)(x, **options)


LAYERS: dict[str, tuple[Callable[..., Any], TensorSpec]] = {
    "two kinds of tokens, causal": (lambda mask: causal(of_two_kinds(mask)), TOKENS),
    "two kinds of tokens": (lambda mask: attention(*[of_two_kinds(mask)] * 3), TOKENS),
    "two kinds of tokens, 300": (lambda mask: causal(of_two_kinds(mask)), TensorSpec("bool", (1, 300))),
    "two kinds of tokens, mean": (lambda mask: reduced("mean", axis=1)(of_two_kinds(mask)), TOKENS),
    "two kinds of tokens, cumulated": (
        lambda mask: reduced("cumulative_sum", axis=1)(of_two_kinds(mask)),
        TOKENS,
    ),
    "embedded": (embedded, TensorSpec("int64", ("B", "L"))),
    "constant values": (constant, X),
    "heads": (HEADS, X),
    "wide heads": (WIDE, TensorSpec("float32", ("B", "L", 128))),
    "block": (block, X),
    "blocks": (lambda x: block(block(block(x))), X),
    "mean of heads": (lambda x: reduced("mean", axis=1)(x + HEADS(x)), X),
    "sum of squares": (lambda x: reduced("sum")(x * x), X),
    "sum": (reduced("sum", axis=1), X),
    "cumulative sum": (reduced("cumulative_sum", axis=1), X),
    "variance": (reduced("var", axis=1), X),
    "softmax of tokens": (softmax_of_tokens, X),
    "difference": (lambda x: x @ WEIGHTS[0] @ WEIGHTS[1] - x @ WEIGHTS[2] @ WEIGHTS[3], X),
    "three numbers": (lambda x: reduced("sum")(x * x), TensorSpec("float32", (3,))),
    "one token": (HEADS, TensorSpec("float32", (1, 1, 16))),
    "last of 300": (lambda x: HEADS(x)[:, -1, :], TensorSpec("float32", (1, 300, 16))),
    "float16": (causal, TensorSpec("float16", ("B", "L", 16))),
    "float64": (causal, TensorSpec("float64", ("B", "L", 16))),
}
"""Each with the spec of its input."""
