"""Layers as graphs: projections, attention and output projection in one, in every form."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from sdpa_xp import masks
from sdpa_xp.layers import MultiHeadAttention, SingleHeadAttention
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

LIKE = np.ones(1, np.float32)
X, Y = TensorSpec("float32", ("B", "L", 32)), TensorSpec("float32", ("B", "S", 24))
SELF = MultiHeadAttention.init(np.random.default_rng(0), 32, num_heads=4, num_kv_heads=2, like=LIKE)
CROSS = MultiHeadAttention.init(
    np.random.default_rng(1), 32, 24, num_heads=4, head_dim=6, out_dim=10, like=LIKE
)
ONE = SingleHeadAttention.init(np.random.default_rng(2), 32, 8, like=LIKE)
LEARNED = SELF.with_parameters({name: array + 0.1 for name, array in SELF.parameters.items()})


@pytest.mark.parametrize("form", ["auto", "attention", "tiled", "primitive"])
@pytest.mark.parametrize(
    "rules", [{}, {"is_causal": True}, {"attn_mask": masks.sliding_window(2, 0), "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("layer", [SELF, LEARNED], ids=["drawn", "with biases"])
def test_self_attention(layer: Any, rules: dict[str, Any], form: str) -> None:
    model = to_onnx(layer, X, form=form, **rules)
    report = verify_layer(model, partial(layer, **rules))
    assert report.agrees, str(report)
    assert form in ("auto", report.form)
    assert [value.name for value in model.graph.input] == ["query"]


def test_a_layer_is_not_verified_by_another() -> None:
    assert not verify_layer(to_onnx(SELF, X), LEARNED).agrees
    assert not verify_layer(to_onnx(SELF, X), partial(SELF, is_causal=True)).agrees


def test_cross_attention_with_padding() -> None:
    lengths = TensorSpec("int64", ("B",))
    model = to_onnx(CROSS, X, Y, attn_mask=masks.padding(lengths))
    assert [value.name for value in model.graph.input] == ["query", "key", "key_lengths"]

    def padded(query: Any, key: Any, key_lengths: Any) -> Any:
        layer = CROSS if query.dtype == np.float32 else wide(CROSS)
        return layer(query, key, attn_mask=masks.padding(key_lengths))

    drawn = {"key_lengths": lambda rng, shape: rng.integers(1, 2, shape)}
    assert verify_layer(model, padded, draw=drawn).agrees


def test_a_single_head_and_its_weights() -> None:
    assert verify_layer(to_onnx(ONE, X, is_causal=True), partial(ONE, is_causal=True)).agrees
    x = np.random.default_rng(3).standard_normal((2, 5, 32)).astype(np.float32)
    model = to_onnx(ONE.weights, X)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    np.testing.assert_allclose(session.run(None, {"query": x})[0], ONE.weights(x), rtol=0, atol=1e-6)


def test_weights_of_any_library() -> None:
    """A layer of torch gives the graph that the same layer of NumPy gives."""
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    layer = MultiHeadAttention.from_torch(module)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(to_onnx(layer, X).SerializeToString())
    found = session.run(None, {"query": x.numpy()})[0]
    np.testing.assert_allclose(found, module(x, x, x)[0].detach().numpy(), rtol=0, atol=2e-6)


def test_an_input_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^MultiHeadAttention: `query` must be as wide"):
        to_onnx(SELF, Y)


def wide(layer: Any) -> Any:
    return layer.with_parameters({name: np.asarray(x, np.float64) for name, x in layer.parameters.items()})
