"""Forms at the edges: half precision, numbers that are not finite, empty lengths, ranks; and their nodes.

Every call in every form is in test_outputs.py, and every mask and bias in the tests of their lowering.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from graphs import run
from internals import metadata_of
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from short_runs import assert_right

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention


@pytest.mark.parametrize("form", ["attention", "primitive", "tiled"])
@pytest.mark.parametrize(
    ("dtype", "narrow"), [("float32", "float16"), ("float32", "bfloat16"), ("float64", "float32")]
)
def test_what_joins_the_scores_in_a_narrower_dtype_is_promoted(dtype: str, narrow: str, form: str) -> None:
    if dtype == "float64" and form == "attention":
        pytest.skip("the node computes float64 to float32 accuracy")
    x, numbers = TensorSpec(dtype, (2, 4, "L", 8)), np.linspace(-1, 1, 4).astype(narrow)
    bias, scale = TensorSpec(narrow, ("L", "L")), TensorSpec(narrow, (4, 1, 1))
    for rules in (
        {"bias": bias},
        {"attn_mask": bias, "bias": biases.alibi(numbers), "scale": scale},
        {} if form == "attention" else {"sinks": numbers, "bias": biases.alibi(4) + numbers[:, None, None]},
    ):
        model = export_attention(x, x, x, **rules, form=form)
        assert_right(model)
        passed = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
        assert {passed[name] for name in ("bias", "attn_mask", "scale") if name in passed} <= {
            onnx.helper.np_dtype_to_tensor_dtype(np.dtype(narrow))
        }


@pytest.mark.parametrize("form", ["attention", "primitive"])
def test_float16_does_not_overflow(form: str) -> None:
    """|q| = |k| = 250 an entry and E = 64: scores of 4 million, where float16 ends at 65,504."""
    qkv = TensorSpec("float16", (1, 2, "L", 64))
    model = export_attention(qkv, qkv, qkv, form=form)
    x = np.full((1, 2, 3, 64), 250, np.float16)
    x[..., 1, :] *= -1
    np.testing.assert_array_equal(run(model, {"query": x, "key": x, "value": x})["output"], x)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    ("heads", "key_heads", "length", "parts"),
    [(8, 8, 1024, 1), (8, 8, 1025, 2), (6, 6, 2800, 3), (8, 2, 4096, 2), (8, 1, 4096, 1), (5, 5, 2048, 5)],
)
def test_heads_are_cut_where_a_block_has_many_scores(
    heads: int, key_heads: int, length: int, parts: int, is_open: bool
) -> None:
    """Into as many parts as divide the key heads, so that a step has at most 2**20 scores if one can."""
    shapes: list[tuple[int, ...]] = []

    class Softmax(OpRun):
        op_domain = ""

        def _run(self, x: np.ndarray, axis: int) -> tuple[np.ndarray]:
            del axis
            shapes.append(x.shape)
            return (np.zeros_like(x),)

    specs = [TensorSpec("float32", (1, count, "S" if is_open else length, 1)) for count in (heads, key_heads)]
    model = export_attention(specs[0], specs[1], specs[1], is_causal=True, form="tiled")
    feeds = {
        name: np.zeros((1, count, length, 1), np.float32)
        for name, count in (("query", heads), ("key", key_heads), ("value", key_heads))
    }
    (output,) = ReferenceEvaluator(model, new_ops=[Softmax]).run(None, feeds)
    assert output.shape == (1, heads, length, 1)
    assert len(shapes) == parts * -(-length // 128)
    assert {shape[:3] for shape in shapes} == {(1, heads // parts, 128)}


def names(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_half_keeps_its_kernel_on_cuda() -> None:
    """There the kernels accumulate in float32; on the CPU the inputs are cast."""
    qkv = TensorSpec("float16", ("B", 8, "L", 64))
    assert names(export_attention(qkv, qkv, qkv, runtime="onnxruntime>=1.28;cuda")) == ["Attention"]
    assert "Cast" in names(export_attention(qkv, qkv, qkv))


def test_auto_says_why() -> None:
    qkv, short = (TensorSpec("float32", (batch, 8, length, 64)) for batch, length in (("B", "L"), (1, 128)))
    for specs, rules, form, reason in [
        (short, {"opset": 17}, "primitive", "not attention: opset 17 was asked for"),
        (short, {"runtime": "onnxruntime>=1.24;cpu"}, "primitive", "right from 1.28 on"),
        (TensorSpec("float64", (1, 8, 128, 64)), {}, "primitive", "float64"),
        (TensorSpec("float32", (2, 1, 8, 99, 64)), {}, "primitive", "at most 4 axes"),
        (qkv, {}, "tiled", "takes no empty batch"),
        (qkv, {"runtime": "onnxruntime>=1.31;cpu"}, "multi_head", "all pairs, open lengths"),
        (qkv, {"outputs": "weights"}, "primitive", "not tiled: weights and scores are L x S arrays"),
        (qkv, {"runtime": "onnxruntime>=1.28;cuda"}, "attention", "on cuda"),
    ]:
        entries = metadata_of(export_attention(specs, specs, specs, **rules))
        assert entries["sdpa_xp.form"] == form
        assert reason in entries["sdpa_xp.reason"]


def test_model_is_one_that_old_tools_load() -> None:
    qkv = TensorSpec("float32", ("B", 8, "L", 64))
    assert export_attention(qkv, qkv, qkv).ir_version <= 11
    assert export_attention(qkv, qkv, qkv, form="primitive").ir_version <= 8


def test_float64_of_width_1() -> None:
    """Where the scale would be one number beside a MatMul, onnxruntime would fold it in as a float32."""
    qkv = TensorSpec("float64", (2, "L", 1))
    for scale in (0.1, 1 / 3):
        assert_right(export_attention(qkv, qkv, qkv, scale=scale))


def test_half_on_cuda_prepares_nothing_in_half() -> None:
    """A scale of the wrong sign is a sign of the query; two biases are added in float32."""
    qkv, bias = TensorSpec("float16", ("B", 8, "L", 64)), TensorSpec("float16", ("L", "L"))
    model = export_attention(qkv, qkv, qkv, scale=-100.0, runtime="onnxruntime>=1.28;cuda")
    assert names(model) == ["Mul", "Attention"]
    (sign,) = model.graph.initializer
    assert onnx.numpy_helper.to_array(sign) == -1
    both = export_attention(qkv, qkv, qkv, bias, bias=bias, form="attention", runtime="onnxruntime>=1.28;cuda")
    assert names(both).count("Cast") >= 6


@pytest.mark.parametrize("name", ["query", "key"])
def test_grouped_query_shows_nan_as_the_library_does(name: str, rng: np.random.Generator) -> None:
    """By itself the operator gives 0 for a row whose query or own key is NaN."""
    query, key = TensorSpec("float32", (2, 8, 6, 16)), TensorSpec("float32", (2, 4, 6, 16))
    model = export_attention(query, key, key, is_causal=True, form="grouped_query")
    specs = {"query": query, "key": key, "value": key}
    feed = {argument: rng.standard_normal(spec.shape).astype(np.float32) for argument, spec in specs.items()}
    feed[name][1, 2, 3, 5] = np.nan
    output = run(model, feed)["output"]
    expected = scaled_dot_product_attention(*feed.values(), is_causal=True)
    assert np.isnan(expected).any()
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [("L", 8), (4, "L", 8)])
@pytest.mark.parametrize("form", ["attention", "tiled", "primitive"])
def test_one_integer_for_a_call_without_a_batch(form: str, shape: Any) -> None:
    """As the library takes it; the result has no axis more for it."""
    qkv = TensorSpec("float32", shape)
    for mask in (masks.causal([1]), masks.prefix(TensorSpec("int64", (1,)))):
        model = export_attention(qkv, qkv, qkv, mask, form=form)
        assert_right(model)
        assert len(model.graph.output[0].type.tensor_type.shape.dim) == len(shape)


def test_a_scale_of_numpy_is_a_number() -> None:
    qkv = TensorSpec("float32", ("B", 4, "L", 64))
    of_numpy, of_python = (export_attention(qkv, qkv, qkv, scale=scale) for scale in (1 / np.sqrt(64), 0.125))
    assert of_numpy == of_python
