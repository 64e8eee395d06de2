"""Layers as graphs: projections, attention and output projection in one, in every form."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from short_runs import agreed

from sdpa_xp import masks
from sdpa_xp.layers import Layer, Linear, MultiHeadAttention, SingleHeadAttention
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")

LIKE = np.ones(1, np.float32)
X, Y = TensorSpec("float32", ("B", "L", 32)), TensorSpec("float32", ("B", "S", 24))
SELF = MultiHeadAttention.init(np.random.default_rng(0), 32, num_heads=4, num_kv_heads=2, like=LIKE)
CROSS = MultiHeadAttention.init(
    np.random.default_rng(1), 32, 24, num_heads=4, head_dim=6, out_dim=10, like=LIKE
)
ONE = SingleHeadAttention.init(np.random.default_rng(2), 32, 8, like=LIKE)
LEARNED = SELF.with_parameters({name: array + 0.1 for name, array in SELF.parameters.items()})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", ["auto", "attention", "tiled", "primitive"])
@pytest.mark.parametrize(
    "rules", [{}, {"is_causal": True}, {"attn_mask": masks.sliding_window(2, 0), "softcap": 2.0}], ids=str
)
def test_self_attention(rules: dict[str, Any], form: str) -> None:
    """With the weights that are drawn, and the biases of a layer that has learned, in turn."""
    layer: Any = SELF if (len(rules) + len(form)) % 2 else LEARNED
    model = to_onnx(layer, X, form=form, **rules)
    report = agreed(verify_layer(model, partial(layer, **rules)))
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


def names_of(model: onnx.ModelProto) -> dict[str, list[int]]:
    return {tensor.name: list(tensor.dims) for tensor in model.graph.initializer if len(tensor.raw_data) > 150}


@pytest.mark.parametrize("called", ["the layer", "a method", "a partial", "a partial method"])
@pytest.mark.parametrize("layer", [LEARNED, CROSS], ids=["self", "cross"])
def test_each_weight_is_held_once_as_it_is_under_its_name(layer: Any, called: str) -> None:
    """Also one that the layer transposes, and one that it computes with."""
    layer = dataclasses.replace(layer, temperature=np.linspace(1, 2, 40, dtype=np.float32)[:4])
    function = {
        "the layer": layer,
        "a method": layer.__call__,
        "a partial": partial(layer, is_causal=True),
        "a partial method": partial(layer.__call__, is_causal=True),
    }[called]
    model = to_onnx(function, X, *([Y] if layer.key.widths[0] == 24 else []))
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for name, array in layer.parameters.items():
        np.testing.assert_array_equal(weights[name], array)
    large = {name: list(x.shape) for name, x in layer.parameters.items() if x.nbytes > 150}
    assert names_of(model) == large
    assert verify_layer(model, function).agrees


def test_half_weights_are_held_in_half() -> None:
    """They are computed with in float32."""
    half = {name: x.astype(np.float16) for name, x in LEARNED.parameters.items()}
    layer, x = LEARNED.with_parameters(half), TensorSpec("float16", ("B", "L", 32))
    model = to_onnx(layer, x)
    assert {tensor.data_type for tensor in model.graph.initializer if "." in tensor.name} == {
        onnx.TensorProto.FLOAT16
    }
    assert verify_layer(model, layer).agrees


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("asarray", [np.asarray, torch.asarray])
def test_an_input_may_be_an_array(asarray: Any, dtype: str) -> None:
    """What is known when the graph is written, and is of the layer's library or another."""
    layer = CROSS.with_parameters({name: x.astype(dtype) for name, x in CROSS.parameters.items()})
    memory = np.random.default_rng(3).standard_normal((1, 3, 24)).astype(dtype)
    model = to_onnx(layer, TensorSpec(dtype, ("B", "L", 32)), asarray(memory))
    agreed(verify_layer(model, lambda query: layer_of(query)(query, memory.astype(query.dtype))))


def layer_of(query: Any) -> Any:
    return CROSS.with_parameters({name: x.astype(query.dtype) for name, x in CROSS.parameters.items()})


def test_a_layer_within_a_function() -> None:
    """Its weights have no names there, and are arrays; half ones too."""
    layer = LEARNED.with_parameters({name: x.astype(np.float16) for name, x in LEARNED.parameters.items()})
    model = to_onnx(lambda x: layer(x) * 2.0, TensorSpec("float16", ("B", "L", 32)))
    x = np.random.default_rng(3).standard_normal((2, 5, 32)).astype(np.float16)
    output = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(output, layer(x) * 2, rtol=0, atol=0.02)


@dataclasses.dataclass(frozen=True, repr=False)
class Stack(Layer):
    """Layers, one behind the other, of the rows of a table."""

    table: Any
    rows: Any
    layers: tuple[Layer, ...]

    def __call__(self, x: Any) -> Any:
        x = x + x.__array_namespace__().take(self.table, self.rows, axis=0)
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_in_a_tuple_and_integers() -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((5, 32), np.float32)
    stack = Stack(table, np.asarray([4]), (SELF, Linear.init(rng, 32, 8)))
    names = [name for name in stack.parameters if name.startswith("layers.1")]
    assert names == ["layers.1.weight", "layers.1.bias"]
    model = to_onnx(stack, X)
    assert {tensor.name for tensor in model.graph.initializer} >= stack.parameters.keys()
    assert verify_layer(model, stack).agrees


@dataclasses.dataclass(frozen=True, repr=False)
class Shown(Layer):
    """A layer that writes down what it is made of."""

    inner: Linear
    texts: list[str]

    def __call__(self, x: Any) -> Any:
        self.texts.append(repr(self.inner))
        return self.inner(x)


def test_a_layer_of_values_is_shown_by_its_shapes() -> None:
    layer = Shown(Linear.init(np.random.default_rng(0), 32, 8), [])
    assert verify_layer(to_onnx(layer, X), layer).agrees
    assert layer.texts[0] == "Linear(32 -> 8, float32)"
    assert {*layer.texts[1:]} == {"Linear(32 -> 8, float32)", "Linear(32 -> 8, float64)"}


def wide(layer: Any) -> Any:
    return layer.with_parameters({name: np.asarray(x, np.float64) for name, x in layer.parameters.items()})
