"""Functions in array-API code become graphs by being called; onnxruntime then computes what they compute.

A traced function is run on float64 arrays for the reference, and on float32 ones for the bound: nothing of the
exporter takes part in either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import array_api_compat
import graphs
import numpy as np
import onnx
import pytest
from internals import judge, metadata_of
from short_runs import agreed

import sdpa_xp
from sdpa_xp import attention_scores, attention_state, biases, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify_layer

X = TensorSpec("float32", ("B", "L", 16))
RNG = np.random.default_rng(11)
WEIGHT = RNG.standard_normal((16, 48)).astype(np.float32)
OUT = RNG.standard_normal((16, 16)).astype(np.float32)


def attending(x: Any, attn_mask: Any = None, weight: Any = WEIGHT, out: Any = OUT, **rules: Any) -> Any:
    """Four heads of width 4 between projections."""
    xp = array_api_compat.array_namespace(x)
    batch, length, _ = x.shape
    heads = xp.permute_dims(xp.reshape(x @ weight, (batch, length, 3, 4, 4)), (2, 0, 3, 1, 4))
    query, key, value = (heads[n, ...] for n in range(3))
    output = scaled_dot_product_attention(query, key, value, attn_mask, **rules)
    return xp.reshape(xp.permute_dims(output, (0, 2, 1, 3)), (batch, length, -1)) @ out


def run(model: onnx.ModelProto, **inputs: np.ndarray) -> list[np.ndarray]:
    return [*graphs.run(model, inputs).values()]


def initializer_of(name: str, model: onnx.ModelProto) -> np.ndarray:
    (initializer,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    return np.asarray(onnx.numpy_helper.to_array(initializer))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def assert_agrees(result: np.ndarray, function: Callable[..., Any], *arrays: Any) -> None:
    """`result` is what `function` gives in float64, up to twice what it is off by in float32."""
    wide = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in arrays]
    exact, rounded = np.asarray(function(*wide), np.float64), np.asarray(function(*arrays))
    assert result.shape == exact.shape
    assert judge(result, exact, rounded, "float32").agrees


@pytest.mark.parametrize("form", ["auto", "attention", "primitive", "tiled"])
def test_projections_and_attention(form: str) -> None:
    model, x = to_onnx(attending, X, form=form), drawn(2, 7, 16)
    (output,) = run(model, x=x)
    assert_agrees(output, lambda x: attending(x, weight=WEIGHT.astype(x.dtype), out=OUT.astype(x.dtype)), x)
    (chosen,) = json.loads(metadata_of(model)["sdpa_xp.forms"])
    assert form in ("auto", chosen["form"])


@pytest.mark.parametrize("opset", [17, 18, 23, 24])
def test_opsets(opset: int) -> None:
    model, x = to_onnx(attending, X, opset=opset, is_causal=True), drawn(2, 5, 16)
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [opset]
    assert_agrees(run(model, x=x)[0], lambda x: attending(x, is_causal=True), x)


def test_arguments_are_inputs_and_rules() -> None:
    """A mask of specs becomes an input; what holds no spec is passed as it is."""
    padding = masks.padding(TensorSpec("int64", ("B",)))
    model = to_onnx(attending, X, padding, is_causal=True, scale=0.3)
    assert [graph_input.name for graph_input in model.graph.input] == ["x", "key_lengths"]
    x, lengths = drawn(3, 6, 16), np.asarray([6, 0, 2])
    (output,) = run(model, x=x, key_lengths=lengths)
    rules: dict[str, Any] = {"is_causal": True, "scale": 0.3}
    assert_agrees(output, lambda x: attending(x, masks.padding(lengths), **rules), x)


def test_masks_and_biases_that_are_computed_or_held() -> None:
    """Values and arrays stand wherever a call takes an array."""
    slopes, sinks, bias = drawn(4), drawn(4) * 2, drawn(4, 1, 1)

    def layer(x: Any, ids: Any, scale: Any) -> Any:
        may = (ids != 0)[:, None, None, :]
        rules = {"bias": biases.alibi(slopes) + biases.from_array(bias), "sinks": sinks * 0.5, "scale": scale}
        return attending(x, masks.from_array(may) & masks.document(ids), **rules)

    specs = X, TensorSpec("int64", ("B", "L")), TensorSpec("float32", ())
    x, ids, scale = drawn(2, 6, 16), np.asarray([[1, 1, 2, 2, 0, 0], [0, 3, 3, 3, 3, 3]]), np.float32(0.4)
    (output,) = run(to_onnx(layer, *specs), x=x, ids=ids, scale=np.asarray(scale))
    expected = layer(x, ids, float(scale))
    np.testing.assert_allclose(output, expected, rtol=0, atol=8 * 2**-23 * np.abs(expected).max())


def test_every_function_of_the_library() -> None:
    def layer(x: Any) -> dict[str, Any]:
        state = attention_state(x, x, x, is_causal=True, lse_base=2)
        layout = sdpa_xp.dot_product_attention(*(x[:, :, None, :] for _ in range(3)), is_causal=True)
        weights, scores = sdpa_xp.attention_weights(x, x, is_causal=True), attention_scores(x, x, softcap=2.0)
        return {**state._asdict(), "weights": weights, "scores": scores, "jax": layout}

    x = drawn(3, 5, 16)
    outputs = run(to_onnx(layer, X), x=x)
    for result, expected in zip(outputs, layer(x).values(), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=8 * 2**-23 * np.abs(expected).max())


def test_a_learned_query_may_be_an_array() -> None:
    """It is enough that one of the three is a value."""
    query, x = drawn(1, 3, 16), drawn(2, 5, 16)

    def pooled(x: Any) -> Any:
        return scaled_dot_product_attention(query, x[:, None, ...], x[:, None, ...])

    (output,) = run(to_onnx(pooled, X), x=x)
    expected = pooled(x)
    np.testing.assert_allclose(output, expected, rtol=0, atol=8 * 2**-23 * np.abs(expected).max())


class Layer(NamedTuple):
    """Its weights have names, and are of any library."""

    weight: Any
    out: Any

    @property
    def parameters(self) -> dict[str, Any]:
        return self._asdict()

    def __call__(self, x: Any, attn_mask: Any = None) -> Any:
        first = attending(x, attn_mask, self.weight, self.out)
        return attending(first, attn_mask, self.weight, self.out)


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy", "array_api_strict", "dask.array"])
def test_weights_of_any_library_are_held_once_under_their_names(module: str) -> None:
    xp = pytest.importorskip(module)
    layer = Layer(*(xp.asarray(weight) for weight in (WEIGHT, OUT)))
    model, x = to_onnx(layer, X), drawn(2, 5, 16)
    floats = [tensor.name for tensor in model.graph.initializer if len(tensor.raw_data) > 512]
    assert floats == ["weight", "out"]
    np.testing.assert_array_equal(initializer_of("weight", model), WEIGHT)
    np.testing.assert_array_equal(initializer_of("out", model), OUT)
    assert_agrees(run(model, x=x)[0], lambda x: Layer(WEIGHT.astype(x.dtype), OUT.astype(x.dtype))(x), x)


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy", "dask.array"])
def test_an_array_may_stand_on_the_left(module: str) -> None:
    """array-api-strict refuses to; there it is `xp.matmul(weight, x)`."""
    weight, x = pytest.importorskip(module).asarray(OUT), drawn(2, 5, 16)
    (output,) = run(to_onnx(lambda x: (weight @ x.mT - weight[:, :1]) * (weight[0, 0] / (x.mT**2 + 1)), X), x=x)
    assert_agrees(output, lambda x: (OUT.astype(x.dtype) @ x.mT - OUT[:, :1]) * (OUT[0, 0] / (x.mT**2 + 1)), x)


def test_weights_may_be_learned() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.asarray(OUT))
    np.testing.assert_array_equal(initializer_of("weight_0", to_onnx(lambda x: weight @ x.mT, X)), OUT)


def test_a_weight_named_as_an_input_is_another_value() -> None:
    class Named:
        parameters = {"x": OUT}  # noqa: RUF012

        def __call__(self, x: Any) -> Any:
            return x @ OUT

    x = drawn(2, 3, 16)
    np.testing.assert_allclose(run(to_onnx(Named(), X), x=x)[0], x @ OUT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["constant_0", "Add_0", "weight_0"])
def test_an_input_may_have_any_name(name: str) -> None:
    """Also one that a constant, a node or a weight without a name would get."""

    def layer(**inputs: Any) -> Any:
        (x,) = inputs.values()
        return (x + 1.0) * 2.0 + x * np.full(16, 3, np.float32)

    model = to_onnx(layer, **{name: X})
    x = np.ones((1, 2, 16), np.float32)
    (output,) = run(model, **{model.graph.input[0].name: x})
    np.testing.assert_array_equal(output, layer(x=x))


def test_specs_in_a_list() -> None:
    model = to_onnx(lambda arrays: arrays[0] + arrays[1], [X, X])
    assert [graph_input.name for graph_input in model.graph.input] == ["arrays", "arrays_1"]


def test_what_no_output_follows_from_is_left_out() -> None:
    def layer(x: Any) -> Any:
        x @ WEIGHT
        return x * 2.0

    model = to_onnx(layer, X)
    assert [node.op_type for node in model.graph.node] == ["Mul"]
    assert len(model.graph.initializer) == 1


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "indexing": lambda xp, x: x[:, 1:, None, ::2] + x[:1, :-1, None, 1::2] * x[0, 0, 0],
    "from_behind": lambda xp, x: x[..., -1] - x[:, ::-1, 3],
    "flattened": lambda xp, x: xp.reshape(x, (-1, 4)) * 2.0,
    "and_back": lambda xp, x: xp.reshape(xp.reshape(x, (-1,)), x.shape) @ OUT.T,
    "kept": lambda xp, x: xp.reshape(x, (x.shape[0], -1, 2, 8)) + 1,
    "positions": lambda xp, x: x + xp.astype(xp.arange(x.shape[1]), x.dtype)[:, None],
    "taken": lambda xp, x: xp.take(xp.asarray(OUT), xp.arange(x.shape[1]), axis=0) + x,
    "concat": lambda xp, x: xp.concat([x, xp.zeros((x.shape[0], 1, 16), dtype=x.dtype)], axis=1),
    "stack": lambda xp, x: xp.stack([x, -x], axis=1),
    "broadcast": lambda xp, x: xp.broadcast_to(x[:, :1, :], x.shape) ** 2,
    "where": lambda xp, x: xp.where(x > 0.5, xp.cos(x), xp.sin(x)),
    "moved": lambda xp, x: (
        xp.moveaxis(x, 0, 2) + xp.squeeze(xp.expand_dims(xp.exp(x), axis=1), axis=1)[0, :, :1, None]
    ),
    "swapped": lambda xp, x: xp.matmul(xp.matrix_transpose(x), x) + x.mT @ x,
    "array_first": lambda xp, x: WEIGHT[:, :16] @ x.mT + (1.0 - x.mT) - WEIGHT[:, :1],
    "sums_of_lengths": lambda xp, x: (
        xp.concat([x, x], axis=1) * xp.astype(xp.asarray(2 + x.shape[0] + x.shape[1] - x.shape[0]), x.dtype)
    ),
    "no_more": lambda xp, x: xp.broadcast_to(x, (0 + x.shape[0], x.shape[1] + 0, 16)) * 1.0,
    "further_positions": lambda xp, x: (
        x + xp.astype(xp.arange(x.shape[0], x.shape[0] + x.shape[1]), x.dtype)[:, None]
    ),
    "count": lambda xp, x: xp.sum(x, axis=1) / xp.astype(xp.asarray(x.shape[1]), x.dtype),
    "clip": lambda xp, x: xp.clip(x, -0.5, 0.5) - xp.minimum(x, xp.abs(x)),
    "computed_lengths": lambda xp, x: (
        x
        * (x.shape[1] // 2 + 2 * x.shape[0] % 3 - x.shape[1] + (7 - x.shape[0]) * x.shape[1] - x.shape[1] ** 2)
        + xp.astype(xp.sum(xp.arange(x.shape[1] // 2) + x.size), x.dtype)
    ),
    "floats_of_lengths": lambda xp, x: (
        x / x.shape[1] ** 0.5 + 1 / x.shape[0] - (x.shape[1] + 0.5) * x / (2.5 - np.sqrt(x.shape[0] / 2))
    ),
    "halves": lambda xp, x: xp.concat([-x[:, x.shape[1] // 2 :, :], x[:, : x.shape[1] // 2, :]], axis=1),
    "split_and_joined": lambda xp, x: xp.reshape(
        xp.reshape(x, (x.shape[0] * x.shape[1], 16)) + xp.ones((x.shape[0] * x.shape[1], 1)), x.shape
    ),
    "last": lambda xp, x: x[:, x.shape[1] - 1, :] + x[:, x.shape[1] - 2 :, :][:, 0, :],
    "triangle": lambda xp, x: xp.tril(x @ x.mT, k=-1) @ xp.eye(x.shape[1], dtype=x.dtype),
    "sorted": lambda xp, x: xp.sort(x, axis=1) - xp.flip(xp.cumulative_sum(x, axis=0)) * xp.roll(x, 2, axis=1),
    "chosen": lambda xp, x: (
        xp.take_along_axis(x, xp.argsort(x, axis=1), axis=1) + xp.repeat(x[:, :1, :], x.shape[1], axis=1)
    ),
    "masked": lambda xp, x: xp.sum(x[x > 0.25]) + x[:, xp.asarray([0, 2]), xp.asarray([[3], [-1]])][..., 0],
    "unique": lambda xp, x: xp.unique_counts(xp.round(x)).counts,
    "products": lambda xp, x: (
        xp.tensordot(x, xp.vecdot(x, x), axes=((0, 1), (0, 1))) + xp.prod(x[:2, 0, :], axis=0)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_standard(name: str) -> None:
    def function(x: Any) -> Any:
        return FUNCTIONS[name](array_api_compat.array_namespace(x), x)

    model, x = to_onnx(function, X), drawn(3, 5, 16)
    assert_agrees(run(model, x=x)[0], function, x)
    (output,) = model.graph.output
    shape = [axis.dim_value or axis.dim_param for axis in output.type.tensor_type.shape.dim]
    assert len(shape) == run(model, x=x)[0].ndim


@pytest.mark.parametrize("dtype", [np.float64, np.dtype("float64"), None])
def test_a_softmax_dtype_is_that_of_any_namespace(dtype: Any) -> None:
    """As the library takes it; None stands for the namespace of the traced array."""

    def layer(x: Any) -> Any:
        chosen = x.__array_namespace__().float64 if dtype is None else dtype
        return scaled_dot_product_attention(x, x, x, softmax_dtype=chosen)

    model = to_onnx(layer, TensorSpec("float32", (1, 2, 5, 8)))
    passed: Any = "float64" if dtype is None else dtype
    direct = export_attention(*[TensorSpec("float32", (1, 2, 5, 8))] * 3, softmax_dtype=passed)
    for graph in (model.graph, direct.graph):
        assert [node.op_type for node in graph.node].count("Cast") >= 2


def test_a_layer_verifies() -> None:
    model = to_onnx(attending, X, masks.padding(TensorSpec("int64", ("B",))), is_causal=True)

    def layer(x: Any, key_lengths: Any) -> Any:
        return attending(x, masks.padding(key_lengths), is_causal=True)

    report = agreed(verify_layer(model, layer, draw={"key_lengths": lambda _, shape: np.ones(shape)}))
    shown = [run.inputs for run in report.runs]
    assert shown[:3] == ["B=2 L=5", "B=5 L=2", "B=1 L=1"]
    for number in (*range(1, 10), 33, 130):
        assert any(text.endswith(f"L={number}") for text in shown)
        assert any(text.startswith(f"B={number} ") for text in shown)
    assert {run.output for run in report.runs} == {"output"}
    assert report.form == "tiled"
    assert report.placements
    assert str(report).startswith(f"tiled: agrees in {len(shown)} runs")


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("length", [1, 4, 7, 9])
def test_a_branch_on_a_length_is_seen(length: int) -> None:
    """A named length is text of another kind than a number, which Python code may tell apart."""

    def branching(x: Any) -> Any:
        return attending(x) * (2 if str(x.shape[-2]) == str(length) else 1)

    assert not verify_layer(to_onnx(branching, X), branching).agrees


@pytest.mark.usefixtures("short_verify")
def test_integers_of_a_table_are_any_of_its_rows() -> None:
    table = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    tokens = TensorSpec("int64", ("L",))

    def embedded(tokens: Any, table: Any = table) -> Any:
        return table[tokens] if isinstance(tokens, np.ndarray) else _rows(table, tokens)

    def _rows(table: Any, tokens: Any) -> Any:
        return tokens.__array_namespace__().take(table, tokens, axis=0)

    other = table.copy()
    other[37] += 1
    model = to_onnx(embedded, tokens)
    assert verify_layer(model, embedded).agrees
    assert not verify_layer(model, partial(embedded, table=other)).agrees


@pytest.mark.usefixtures("short_verify")
def test_an_output_in_another_dtype_does_not_verify() -> None:
    def half(x: Any) -> Any:
        xp = x.__array_namespace__()
        return xp.astype(x * 1.7, xp.float16)

    assert verify_layer(to_onnx(half, X), half).agrees
    assert not verify_layer(to_onnx(half, X), lambda x: x * 1.7).agrees


@pytest.mark.usefixtures("short_verify")
def test_what_is_drawn_is_fed() -> None:
    """NaN in an input shows in what both compute; a model that ignores it is another one."""
    model = to_onnx(attending, X)
    nan = {"x": lambda _, shape: np.full(shape, np.nan)}
    assert verify_layer(model, attending, draw=nan).agrees
    assert not verify_layer(model, lambda x: np.nan_to_num(attending(x)), draw=nan).agrees
