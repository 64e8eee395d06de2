"""Exported models that are cut into parts, and joined to others."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import onnx.shape_inference
import onnx.utils
import pytest
from tools.models import COUNTS, MODELS, TABLE, run
from tools.results import assert_equal, expected

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention

TOKENS = TensorSpec("float32", ("B", 4, "L", 8))
FORMS = ("primitive", "tiled", "attention")
RULES = {
    "causal": {"is_causal": True},
    "padding": {"attn_mask": masks.padding(COUNTS)},
    "bias": {"bias": biases.relative(TABLE)},
}


def extracted(model: onnx.ModelProto, folder: Path, inputs: list[str], outputs: list[str]) -> onnx.ModelProto:
    source, target = folder / "source.onnx", folder / "target.onnx"
    onnx.save(model, source)
    onnx.utils.extract_model(str(source), str(target), inputs, outputs)
    return onnx.load(target)


def edges(model: onnx.ModelProto, count: int) -> list[str]:
    """Names of activations all over the graph: floats of known ranks that are the only output of their node."""
    known = {
        value.name: value.type.tensor_type
        for value in onnx.shape_inference.infer_shapes(model).graph.value_info
    }
    floats = {
        name
        for name, kind in known.items()
        if kind.elem_type == onnx.TensorProto.FLOAT and kind.HasField("shape")
    }
    names = [node.output[0] for node in model.graph.node if len(node.output) == 1 and node.output[0] in floats]
    return names[:: max(1, len(names) // count)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_can_be_cut_at_any_activation(name: str, tmp_path: Path) -> None:
    """Up to the value, and from it: the first part computes it, and the second what follows from it."""
    model, feeds = MODELS[name].model, MODELS[name].feeds(0)
    inputs, outputs = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    for edge in edges(model, 6):
        first = extracted(model, tmp_path, inputs, [edge])
        (between,) = run(first, feeds)
        second = extracted(model, tmp_path, [*inputs, edge], outputs)
        assert_equal(run(second, feeds | {edge: between}), expected(name, 0))


@pytest.mark.parametrize(("one", "other"), [*product(FORMS, FORMS)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("into", ["query", "key", "value"])
@pytest.mark.sampled(4)
def test_two_models_are_merged(one: str, other: str, rule: str, into: str, tmp_path: Path) -> None:
    """Two with the same names: each gets a prefix. Then the second is cut out again."""
    rules = RULES[rule]
    first = export_attention(TOKENS, TOKENS, TOKENS, form=one, opset=23, is_causal=True)
    second = export_attention(TOKENS, TOKENS, TOKENS, form=other, opset=23, **rules)
    merged = onnx.compose.merge_models(
        first, second, io_map=[("output", into)], prefix1="first/", prefix2="second/"
    )
    onnx.checker.check_model(merged, full_check=True)
    rng = np.random.default_rng(0)
    feeds = {
        graph_input.name: rng.integers(1, 150, 2)
        if graph_input.name.endswith("key_lengths")
        else rng.standard_normal((2, 4, 150, 8), np.float32)
        for graph_input in merged.graph.input
    }
    (between,) = run(first, {name.removeprefix("first/"): array for name, array in feeds.items()})
    right = run(
        second, {name.removeprefix("second/"): array for name, array in feeds.items()} | {into: between}
    )
    assert_equal(run(merged, feeds), right)
    inputs = [f"second/{graph_input.name}" for graph_input in second.graph.input if graph_input.name != into]
    cut = extracted(merged, tmp_path, ["first/output", *inputs], [merged.graph.output[0].name])
    assert_equal(run(cut, feeds | {"first/output": between}), right)
    prefixed = onnx.compose.add_prefix(merged, "both/")
    assert_equal(run(prefixed, {f"both/{name}": array for name, array in feeds.items()}), right)


def test_layers_of_two_forms_are_merged() -> None:
    one, other = MODELS["layers, tiled"], MODELS["layers, primitive"]
    (name,) = (value.name for value in one.model.graph.output)
    merged = onnx.compose.merge_models(
        one.model, other.model, io_map=[(name, "x")], prefix1="first/", prefix2="second/"
    )
    feeds = one.feeds(0)
    (right,) = run(other.model, feeds | {"x": expected("layers, tiled", 0)[0]})
    lengths = {f"{prefix}/key_lengths": feeds["key_lengths"] for prefix in ("first", "second")}
    assert_equal(run(merged, {"first/x": feeds["x"]} | lengths), [right])
