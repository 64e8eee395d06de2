"""`verify_layer` finds the weights of any layer; where it has no reference in float64, it says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from short_runs import agreed

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp.layers import MultiHeadAttention
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")

LIKE = np.ones(1, np.float32)
ATTENTION = MultiHeadAttention.init(np.random.default_rng(0), 16, num_heads=2, like=LIKE)
INNER, OUTER = (np.random.default_rng(n).standard_normal((16, 16), np.float32) / 4 for n in (1, 2))
X, IDS = TensorSpec("float32", ("B", "L", 16)), TensorSpec("int64", ("B", "L"))


def residual(x: Any) -> Any:
    return x + ATTENTION(x)


def of_default(x: Any, attention: Any = ATTENTION) -> Any:
    return x + attention(x)


class Block:
    """Norm, attention, MLP, as a plain class."""

    def __init__(self, attention: Any = ATTENTION) -> None:
        self.attention, self.weights = attention, {"inner": INNER, "outer": [OUTER]}

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        hidden = self.norm(x) @ self.weights["inner"]
        xp = x.__array_namespace__()
        return x + xp.where(hidden > 0, hidden, xp.zeros_like(hidden)) @ self.weights["outer"][0]

    def norm(self, x: Any) -> Any:
        xp = x.__array_namespace__()
        centred = x - xp.mean(x, axis=-1, keepdims=True)
        return centred / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)


class Stack:
    def __init__(self) -> None:
        self.blocks = [Block(), Block()]

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


HOLDING: dict[str, Callable[..., Any]] = {
    "a global": residual,
    "a partial": partial(of_default, attention=ATTENTION),
    "attributes": Block(),
    "a list": Stack(),
}


@pytest.mark.parametrize("name", HOLDING)
def test_a_layer_that_holds_layers(name: str) -> None:
    layer = HOLDING[name]
    model = to_onnx(layer, X)
    report = agreed(verify_layer(model, layer))
    assert report.reference == "float64"
    assert report.notes == ()

    def other(x: Any) -> Any:
        return layer(x) * 1.00001

    assert not verify_layer(to_onnx(other, X), layer).agrees


@pytest.mark.needs("torch")
def test_weights_of_torch_and_a_torch_module() -> None:
    import torch

    attention = MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(16, 2, batch_first=True))
    agreed(verify_layer(to_onnx(Block(attention), X), Block(attention)))

    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            x = x @ self.inner.weight.mT + self.inner.bias
            return scaled_dot_product_attention(x, x, x)

    module = Module()
    model = to_onnx(module, X)
    assert [value.name for value in model.graph.input] == ["x"]
    report = verify_layer(model, module)
    assert (report.agrees, report.reference) == (True, "float64"), str(report)


@pytest.mark.needs("torch")
def test_methods_of_tensors_are_those_of_torch() -> None:
    """The copies of tensors stay tensors: NumPy has other methods, and some of them mean something else."""
    import torch

    weight = torch.tensor(INNER)
    linear = torch.nn.Linear(16, 16)
    parameter = linear.weight
    attention = MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(16, 2, batch_first=True))

    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(16, 16)
            self.register_buffer("shift", torch.ones(16) / 3)

        def forward(self, x: Any) -> Any:
            return x @ self.inner.weight.detach().numpy().T - self.shift

    layers: list[Callable[..., Any]] = [
        lambda x: x @ weight.transpose(0, 1),
        lambda x: x @ weight.numpy(),
        lambda x: x @ weight.float().numpy() + weight.max(0).values,
        lambda x: weight[0] - x @ weight.T.contiguous().numpy() * weight.size(0),
        lambda x: x @ (weight * 2).numpy() @ torch.linalg.inv(weight) @ OUTER,
        lambda x: x @ linear.state_dict()["weight"].numpy(),
        lambda x: x @ linear.weight.detach().numpy() / (1.5 + linear.bias * linear.bias),
        lambda x: x @ weight.bfloat16().float().t(),
        lambda x: x + torch.arange(16).float(),
        lambda x: attention(x) @ weight.transpose(0, 1),
        Module(),
    ]
    for number, layer in enumerate(layers):
        report = verify_layer(to_onnx(layer, X), layer)
        assert (report.agrees, report.reference) == (True, "float64"), (number, str(report))
    assert linear.weight is parameter
    assert type(weight) is torch.Tensor
    wrong = to_onnx(lambda x: x @ weight, X)
    assert not verify_layer(wrong, layers[0]).agrees


@pytest.mark.needs("jax")
def test_methods_that_numpy_does_not_have() -> None:
    import jax.numpy as jnp

    weight = jnp.asarray(INNER)

    def layer(x: Any) -> Any:
        return x @ weight.at[0].set(1.0)

    report = verify_layer(to_onnx(layer, X), layer)
    assert (report.agrees, report.reference) == (True, "float32"), str(report)
    assert report.notes[0].startswith("the reference is the layer in float32, not in float64: ")
    assert not verify_layer(to_onnx(lambda x: x @ weight, X), layer).agrees


def test_arrays_among_the_keywords() -> None:
    bias = np.random.default_rng(3).standard_normal((16, 16)).astype(np.float32)

    def layer(x: Any, bias: Any) -> Any:
        return scaled_dot_product_attention(x, x, x, bias=bias)

    keywords = {"bias": biases.from_array(bias)}
    square = TensorSpec("float32", ("B", 16, 16))
    report = verify_layer(to_onnx(layer, square, **keywords), layer, **keywords)
    assert (report.agrees, report.reference) == (True, "float64"), str(report)


def embedding(table: Any) -> Callable[..., Any]:
    def layer(ids: Any) -> Any:
        xp = ids.__array_namespace__()
        rows = xp.take(table, xp.reshape(ids, (-1,)), axis=0)
        x = xp.reshape(rows, (ids.shape[0], 1, ids.shape[1], table.shape[1]))
        return scaled_dot_product_attention(x, x, x, is_causal=True)

    return layer


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(4))
def test_integer_inputs_alone(seed: int, dtype: str) -> None:
    """Weights in a closure are float64 in the reference; so rounding errors are measured."""
    layer = embedding(np.random.default_rng(seed).standard_normal((256, 8)).astype(dtype))
    report = verify_layer(to_onnx(layer, IDS), layer, seed=seed)
    assert (report.agrees, report.reference) == (True, "float64"), str(report)


def test_boolean_inputs_alone() -> None:
    def layer(mask: Any) -> Any:
        xp = mask.__array_namespace__()
        x = xp.astype(mask, xp.float32)[..., None] * INNER[0] + INNER[1]
        return scaled_dot_product_attention(x, x, x, is_causal=True)

    report = verify_layer(to_onnx(layer, TensorSpec("bool", ("B", "L"))), layer)
    assert (report.agrees, report.reference) == (True, "float64"), str(report)


def test_a_reference_that_is_not_to_be_had() -> None:
    """The layer names float32 itself: in what it returns, or so that float64 is refused."""
    numbers = np.random.default_rng(0).standard_normal((64, 8)).tolist()

    def returned(ids: Any) -> Any:
        return embedding(np.asarray(numbers, np.float32))(ids)

    def refused(x: Any) -> Any:
        xp = x.__array_namespace__()
        return scaled_dot_product_attention(x, xp.astype(x > 0, xp.float32) * -2.0, x)

    for layer, spec, why in (
        (returned, IDS, "it computes output in float32 there too"),
        (refused, X, "it raises an error there, scaled_dot_product_attention: "),
    ):
        model = to_onnx(layer, spec)
        report = agreed(verify_layer(model, layer))
        assert report.reference == "float32"
        (note,) = report.notes
        assert note.startswith(f"the reference is the layer in float32, not in float64: {why}")
        assert note in report._repr_html_().replace("&#x27;", "'").replace("&lt;", "<")
        wrong = to_onnx(lambda x, layer=layer: layer(x) * 1.0001, spec)
        assert not verify_layer(wrong, lambda x, layer=layer: layer(x)).agrees


def doubled(x: Any) -> Any:
    return x * 2 if str(x.dtype) == "float32" else x * 3


def nearly(x: Any) -> Any:
    return x + 1e-4 if str(x.dtype) == "float32" else x


def of_double(x: Any) -> Any:
    return x if str(x.dtype) == "float64" else scaled_dot_product_attention(x, x, x, masks.causal())


def in_float32(of_float32: Any, of_float64: Any) -> Any:
    """A layer that is one function in float64, and another in every other dtype."""
    return lambda x: of_float64(x) if str(x.dtype) == "float64" else of_float32(x)


def whole(x: Any, factor: float) -> Any:
    xp = x.__array_namespace__()
    return xp.astype(x * factor, xp.int32)


OTHERS: dict[str, tuple[Any, Any]] = {
    "twice": (doubled, lambda x: x * 3),
    "a little": (nearly, lambda x: x * 1.0),
    "attention": (of_double, lambda x: x * 1.0),
    "booleans": (lambda x: x > 0, lambda x: x < 0),
    "integers": (lambda x: whole(x, 10.0), lambda x: whole(x, 20.0)),
    "infinities": (lambda x: x * 1.0, lambda x: x / 0.0),
    "shapes": (lambda x: x * 1.0, lambda x: x[:, :, :2]),
    "names": (lambda x: {"a": x * 1.0}, lambda x: {"b": x * 1.0}),
    "one of two": (lambda x: (x + 1.0, x * 2), lambda x: (x + 1.0, x * 3)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_is_another_function_in_float64(name: str) -> None:
    """The graph of what it is in float64 is wrong, and the one of what it is in float32 is right."""
    of_float32, in_float64 = OTHERS[name]
    layer = in_float32(of_float32, in_float64)
    right = agreed(verify_layer(to_onnx(of_float32, X), layer))
    assert right.reference == "float32"
    assert right.notes[0].startswith("the reference is the layer in float32, not in float64: ")
    if name == "names":
        with pytest.raises((KeyError, ValueError)):
            verify_layer(to_onnx(in_float64, X), layer)
    else:
        assert not verify_layer(to_onnx(in_float64, X), layer).agrees


def test_integers_that_rounding_errors_decide() -> None:
    """A few may differ, as in NumPy itself; many may not."""
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)

    def layer(x: Any) -> Any:
        return whole(x @ weight, 1e6)

    def wrong(x: Any) -> Any:
        return whole(x @ weight, 1.00001e6)

    report = verify_layer(to_onnx(layer, X), layer)
    assert (report.agrees, report.reference) == (True, "float64"), str(report)
    assert not verify_layer(to_onnx(wrong, X), layer).agrees


def test_errors_name_what_can_help() -> None:
    """Values do not mend an error of types."""

    def broken(x: Any) -> Any:  # noqa: ARG001
        raise TypeError("no such type")

    model = to_onnx(lambda x: x + x, X)
    words = r"(?s)^no such type.*\nverify_layer called the layer with NumPy arrays"
    with pytest.raises(TypeError, match=words) as raised:
        verify_layer(model, broken)
    assert "draw=" not in str(raised.value.__notes__)
