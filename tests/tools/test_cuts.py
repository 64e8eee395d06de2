"""Exported models that are cut into parts, and joined to others."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.compose
import onnx.shape_inference
import onnx.utils
import pytest
from tools.models import MODELS, run
from tools.results import assert_equal, expected


def extracted(model: onnx.ModelProto, folder: Path, inputs: list[str], outputs: list[str]) -> onnx.ModelProto:
    source, target = folder / "source.onnx", folder / "target.onnx"
    onnx.save(model, source)
    onnx.utils.extract_model(str(source), str(target), inputs, outputs)
    return onnx.load(target)


def edges(model: onnx.ModelProto, count: int) -> list[str]:
    """Names of activations all over the graph: floats of known ranks that are the only output of their node."""
    inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
    known = {value.name: value.type.tensor_type for value in inferred}
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
