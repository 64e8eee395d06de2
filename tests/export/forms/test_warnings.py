"""A floating mask of zeros and ones masks nothing: an export of one as a constant warns, as a call does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sdpa_xp import KVCache, attention_weights, biases, masks, scaled_dot_product_attention
from sdpa_xp.layers import Layer, MultiHeadAttention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify

F = np.float32
CAUSAL = np.tri(5, dtype=F)
QKV = TensorSpec("float32", (1, 2, 5, 8))
HEADS = MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2)
X = TensorSpec("float32", ("B", 5, 8))


def attended(x: Any, mask: Any = CAUSAL) -> Any:
    return scaled_dot_product_attention(x, x, x, mask)


@dataclass(frozen=True, repr=False)
class Masked(Layer):
    mask: Any

    def __call__(self, x: Any) -> Any:
        return attended(x, self.mask)


def from_numbers(x: Any) -> Any:
    xp = x.__array_namespace__()
    return attended(x, xp.asarray([[1.0] * (i + 1) + [0.0] * (4 - i) for i in range(5)], dtype=x.dtype))


def cached(x: Any, key: Any) -> Any:
    return KVCache(key, key).attend(x, CAUSAL, is_causal=False)


EXPORTS: dict[str, Callable[[], Any]] = {
    "export_attention": lambda: export_attention(QKV, QKV, QKV, CAUSAL),
    "half": lambda: export_attention(*[TensorSpec("float16", QKV.shape)] * 3, CAUSAL.astype("float16")),
    "weights": lambda: to_onnx(lambda x: attention_weights(x, x, attn_mask=CAUSAL), QKV),
    "a global": lambda: to_onnx(attended, QKV),
    "an argument": lambda: to_onnx(attended, QKV, CAUSAL),
    "a keyword": lambda: to_onnx(HEADS, X, attn_mask=CAUSAL),
    "a parameter": lambda: to_onnx(Masked(CAUSAL), QKV),
    "numbers": lambda: to_onnx(from_numbers, QKV),
    "a cache": lambda: to_onnx(cached, QKV, QKV),
    "torch": lambda: to_onnx(attended, QKV, pytest.importorskip("torch").ones((5, 5)).tril()),
    "a call to verify": lambda: verify(
        export_attention(QKV, QKV, QKV, bias=CAUSAL),
        call={"query": QKV, "key": QKV, "value": QKV, "attn_mask": CAUSAL},
    ),
}


@contextmanager
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield record


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.usefixtures("short_verify")
def test_a_constant_of_zeros_and_ones_is_warned_of(name: str) -> None:
    """The warning shows the line of the caller, or that of the layer."""
    with warned() as record:
        EXPORTS[name]()
    (warning,) = record
    assert "must be boolean to mask" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.usefixtures("short_verify")
def test_what_is_not_warned_of() -> None:
    """What masks, what is a bias, what only a run knows, and a model whose export has warned."""
    with warned() as record:
        model = export_attention(QKV, QKV, QKV, CAUSAL)
    assert len(record) == 1
    with warned() as record:
        assert verify(model).agrees
        weights = np.where(CAUSAL > 0, F(0), F(-np.inf))
        for mask in (CAUSAL > 0, weights, 2 * CAUSAL, masks.from_array(CAUSAL > 0)):
            export_attention(QKV, QKV, QKV, mask)
            to_onnx(Masked(mask), QKV)
        export_attention(QKV, QKV, QKV, bias=CAUSAL)
        export_attention(QKV, QKV, QKV, bias=biases.from_array(CAUSAL))
        to_onnx(attended, QKV, TensorSpec("float32", (5, 5)))
    assert record == []
