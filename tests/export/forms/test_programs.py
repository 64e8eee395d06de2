"""Graphs for other programs than onnxruntime: what stands in them, and what is refused.

tests/export/runtime/test_engines.py and quality/runtime/test_onnx_reference.py run them.
"""

from __future__ import annotations

import numpy as np
import pytest
from edits import nodes
from feature_calls import features
from internals import Runtime, exported_models, metadata_of, runtime_notes, stated_runtimes
from short_runs import assert_right

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx
from sdpa_xp_export.export import export_call

OPENVINO = "openvino>=2026.4;cpu"
X = TensorSpec("float32", ("B", 4, "L", 16))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_onnx_has_only_operators_that_each_program_has(dtype: str) -> None:
    """Attention came with opset 23, so that many programs lack it; without `form`, it is not written."""
    for name, call in features(dtype).items():
        model = export_call(call, runtime="onnx")
        assert {node.domain for node in nodes(model.graph)} == {""}, name
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 18)], name
        assert "Attention" not in {node.op_type for node in nodes(model.graph)}, name


def test_openvino_gets_no_operator_that_it_cannot_read() -> None:
    for name, call in features("float32").items():
        if call.softmax_dtype is None and name != "mask: documents":
            model = export_call(call, runtime=OPENVINO)
            assert {node.domain for node in nodes(model.graph)} == {""}, name


@pytest.mark.parametrize("runtime", [OPENVINO, "onnx"])
def test_they_are_right_in_onnxruntime_too(runtime: str) -> None:
    mask = masks.causal() & masks.padding(TensorSpec("int64", ("B",)))
    for form in ("auto", "primitive"):
        model = export_attention(X, X, X, mask, form=form, runtime=runtime, outputs=("output", "lse"))
        assert_right(model)
        assert str(Runtime.parse("test", metadata_of(model)["sdpa_xp.runtime"])) == runtime


@pytest.mark.parametrize(("runtime", "opset"), [(OPENVINO, 18), ("onnx", 18), ("onnxruntime>=1.28;cpu", 24)])
def test_a_layer_has_the_opset_that_most_programs_read(runtime: str, opset: int) -> None:
    def layer(x: np.ndarray) -> np.ndarray:
        return scaled_dot_product_attention(x * 2, x, x, is_causal=True)

    model = to_onnx(layer, X, runtime=runtime)
    assert [entry.version for entry in model.opset_import if not entry.domain] == [opset]
    if runtime != OPENVINO:
        attention = to_onnx(layer, X, runtime=runtime, form="attention")
        assert "Attention" in {node.op_type for node in attention.graph.node}


def test_the_reason_names_the_program() -> None:
    reasons = [
        metadata_of(export_attention(X, X, X, runtime=runtime))["sdpa_xp.reason"]
        for runtime in (OPENVINO, "onnx")
    ]
    assert reasons[0].startswith("all pairs, open lengths: the best for openvino>=2026.4;cpu")
    assert reasons[1].startswith(
        "all pairs, open lengths: expected to be the best for onnx, but programs differ"
    )
    newer = metadata_of(export_attention(X, X, X, runtime="openvino>=2027.1;cpu"))["sdpa_xp.reason"]
    assert newer.endswith("the newest release tried is 2026.4.1")


def test_onnxruntime_promises_nothing_for_a_file_of_openvino() -> None:
    def notes(runtime: str) -> tuple[str, ...]:
        parts = exported_models(export_attention(X, X, X, runtime=runtime))
        return runtime_notes(stated_runtimes(parts), "1.31.1", ["CPUExecutionProvider"])

    words = f"the file is for {OPENVINO}, and not for onnxruntime: results are not promised"
    assert notes(OPENVINO) == (words,)
    assert notes("onnx") == ()
