"""`verify` tells a right model from a wrong one, and says where each node ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sdpa_xp_export import TensorSpec, export_attention, verify
from sdpa_xp_export.agreement import judge

QKV = TensorSpec("float32", ("B", 4, "L", 16))
MASK = TensorSpec("bool", ("B", 1, "L", "L"))


def attribute(model: onnx.ModelProto, name: str) -> onnx.AttributeProto:
    (found,) = [a for node in model.graph.node for a in node.attribute if a.name == name]
    return found


def drop_scale(model: onnx.ModelProto) -> None:
    attribute(model, "scale").f = 1.0


def drop_causal(model: onnx.ModelProto) -> None:
    attribute(model, "is_causal").i = 0


def drop_softcap(model: onnx.ModelProto) -> None:
    attribute(model, "softcap").f = 0.0


def flip_mask(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, onnx.helper.make_node("Not", ["attn_mask"], ["flipped"]))
    for node in model.graph.node[1:]:
        node.input[:] = ["flipped" if name == "attn_mask" else name for name in node.input]


def finfo_min_for_inf(model: onnx.ModelProto) -> None:
    """What makes an empty row the mean of the values instead of 0, once nothing blanks it afterwards."""
    for constant in model.graph.initializer:
        if np.isneginf(numpy_helper.to_array(constant)).all():
            least = np.asarray(np.finfo(np.float32).min)
            constant.CopyFrom(numpy_helper.from_array(least.astype(np.float32), constant.name))
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    for node in model.graph.node:
        if node.op_type == "Where" and softmax.output[0] in node.input:
            blanked = node.output[0]
    for node in model.graph.node:
        node.input[:] = [softmax.output[0] if name == blanked else name for name in node.input]


@pytest.mark.parametrize(
    ("rules", "damage"),
    [
        ({}, drop_scale),
        ({"is_causal": True}, drop_causal),
        ({"softcap": 1.0}, drop_softcap),
        ({"attn_mask": MASK}, flip_mask),
        ({"attn_mask": MASK, "form": "primitive"}, finfo_min_for_inf),
    ],
)
def test_damaged_graph_is_caught(rules: dict[str, Any], damage: Callable[[onnx.ModelProto], None]) -> None:
    model = export_attention(QKV, QKV, QKV, **rules)
    assert verify(model).agrees
    damage(model)
    report = verify(model)
    assert not report.agrees
    assert "DISAGREES" in str(report)


def test_nodes_and_their_provider() -> None:
    report = verify(export_attention(QKV, QKV, QKV, is_causal=True))
    assert [(placed.op, placed.provider) for placed in report.placements] == [
        ("Attention", "CPUExecutionProvider")
    ]
    assert {run.inputs for run in report.runs} == {"B=2 L=5", "B=5 L=2", "B=1 L=1"}
    assert all(run.provider == "CPUExecutionProvider" and run.seconds > 0 for run in report.runs)


def test_from_a_file(tmp_path: Path) -> None:
    onnx.save(export_attention(QKV, QKV, QKV), tmp_path / "a.onnx")
    assert verify(tmp_path / "a.onnx").agrees
    assert verify(str(tmp_path / "a.onnx")).agrees


def test_refused(tmp_path: Path) -> None:
    model = export_attention(QKV, QKV, QKV)
    with pytest.raises(ValueError, match=r"verify: `provider` must be one that onnxruntime offers.*'tpu'"):
        verify(model, provider="tpu")
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "none.onnx")
    del model.metadata_props[:]
    with pytest.raises(ValueError, match="verify: `model` must be one that export_attention wrote"):
        verify(model)


@pytest.mark.parametrize(
    ("result", "agrees"),
    [
        ([1.0, 2.0], True),
        ([1.0, 2.0 + 2**-21], True),
        ([1.0, 2.001], False),
        ([1.0, np.nan], False),
        ([np.inf, 2.0], False),
    ],
)
def test_judge(result: list[float], agrees: bool) -> None:
    exact = np.asarray([1.0, 2.0])
    found = judge(np.asarray(result, np.float32), exact, exact.astype(np.float32), "float32")
    assert found.agrees is agrees
    assert found.bound == pytest.approx(4 * 2**-23 * 2)


def test_judge_asks_for_the_same_nonfinite_values() -> None:
    exact, plain = np.asarray([np.nan, np.inf, 1.0]), np.zeros(3, np.float32)
    assert judge(exact.astype(np.float32), exact, plain, "float32").absolute == 0
    swapped = np.asarray([np.nan, -np.inf, 1.0], np.float32)
    assert not judge(swapped, exact, plain, "float32").agrees
    with pytest.raises(ValueError, match="judge: `result` must have the shape of the reference"):
        judge(np.zeros(2), exact, plain, "float32")


def test_judge_a_textbook_that_overflows_allows_nothing() -> None:
    exact = np.asarray([1.0])
    found = judge(np.asarray([1.5], np.float32), exact, np.asarray([np.nan], np.float32), "float32")
    assert not found.agrees
