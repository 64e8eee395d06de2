"""`verify` tells a right model from a wrong one, and says where each node ran."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention, verify
from sdpa_xp_export._runtime.session import placements
from sdpa_xp_export._verify.agreement import judge
from sdpa_xp_export.report import Agreement, Placement

QKV = TensorSpec("float32", ("B", 4, "L", 16))
FIXED = TensorSpec("float32", (2, 4, 5, 16))
KEY = TensorSpec("float32", ("B", 4, "S", 16))
FUSED = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
MASK = TensorSpec("bool", ("B", 1, "L", "L"))


def attribute(model: onnx.ModelProto, name: str) -> onnx.AttributeProto:
    (found,) = [a for node in model.graph.node for a in node.attribute if a.name == name]
    return found


def drop_scale(model: onnx.ModelProto) -> None:
    """The attribute of the fused operators; or the number that the query is multiplied by first."""
    if any(node.op_type in FUSED for node in model.graph.node):
        for node in model.graph.node:
            for each in node.attribute:
                if each.name == "scale":
                    each.f = 1.0
        return
    scaled = next(node for node in model.graph.node if node.op_type == "Mul")
    (number,) = (each for each in model.graph.initializer if each.name in scaled.input)
    number.CopyFrom(numpy_helper.from_array(np.asarray(1.0, np.float32), number.name))


def drop_causal(model: onnx.ModelProto) -> None:
    attribute(model, "is_causal").i = 0


def drop_softcap(model: onnx.ModelProto) -> None:
    attribute(model, "softcap").f = 0.0


def flip_mask(model: onnx.ModelProto) -> None:
    for node in all_nodes(model.graph):
        node.input[:] = ["flipped" if name == "attn_mask" else name for name in node.input]
    model.graph.node.insert(0, onnx.helper.make_node("Not", ["attn_mask"], ["flipped"]))


def finfo_min_for_inf(model: onnx.ModelProto) -> None:
    """What makes an empty row the mean of the values instead of 0, once nothing blanks it afterwards."""
    least = np.asarray(np.finfo(np.float32).min)
    for constant in model.graph.initializer:
        if np.isneginf(numpy_helper.to_array(constant)).all():
            constant.CopyFrom(numpy_helper.from_array(least.astype(np.float32), constant.name))
    for graph in all_graphs(model.graph):
        blanked = graph.node[-1]
        if blanked.op_type == "Where":
            blanked.op_type, blanked.input[:] = "Identity", [blanked.input[1]]


def lower_right(model: onnx.ModelProto) -> None:
    """Causal masks count from the last query and the last key."""
    for graph in all_graphs(model.graph):
        for index, node in enumerate(graph.node):
            if node.op_type == "LessOrEqual":
                graph.node.insert(index, onnx.helper.make_node("Add", [node.input[1], "shift"], ["shifted"]))
                node.input[1] = "shifted"
                break
    lengths = [
        onnx.helper.make_node("Shape", ["key"], ["keys"], start=2, end=3),
        onnx.helper.make_node("Shape", ["query"], ["queries"], start=2, end=3),
        onnx.helper.make_node("Sub", ["keys", "queries"], ["shift"]),
    ]
    for node in reversed(lengths):
        model.graph.node.insert(0, node)


def first_block_again(model: onnx.ModelProto) -> None:
    """Every block of queries takes itself for the first one."""
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), "zero"))
    body = list(all_graphs(model.graph))[1]
    next(node for node in body.node if node.op_type == "Mul").input[1] = "zero"


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph, and the bodies of its loops."""
    yield graph
    for node in graph.node:
        for each in node.attribute:
            if each.type == onnx.AttributeProto.GRAPH:
                yield from all_graphs(each.g)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for each in all_graphs(graph):
        yield from each.node


PADDED = masks.causal() & masks.padding(TensorSpec("int64", ("B",)))


@pytest.mark.parametrize(
    ("key", "rules", "forms", "damage"),
    [
        (QKV, {}, ("attention", "multi_head", "tiled", "primitive"), drop_scale),
        (QKV, {"is_causal": True}, ("grouped_query",), drop_scale),
        (QKV, {"is_causal": True}, ("attention",), drop_causal),
        (QKV, {"softcap": 1.0}, ("attention",), drop_softcap),
        (QKV, {"attn_mask": MASK}, ("attention", "tiled", "primitive"), flip_mask),
        (QKV, {"attn_mask": MASK}, ("tiled", "primitive"), finfo_min_for_inf),
        (KEY, {"attn_mask": PADDED}, ("attention", "tiled", "primitive"), lower_right),
        (KEY, {"attn_mask": PADDED}, ("tiled",), first_block_again),
        (QKV, {"attn_mask": masks.sliding_window(2, 0)}, ("tiled",), first_block_again),
    ],
)
def test_damaged_graph_is_caught(
    key: TensorSpec, rules: dict[str, Any], forms: tuple[str, ...], damage: Callable[[onnx.ModelProto], None]
) -> None:
    for form in forms:
        query = FIXED if form in ("multi_head", "grouped_query") else QKV
        own = query if key is QKV else key
        model = export_attention(query, own, own, **rules, form=form)
        assert verify(model).agrees, form
        damage(model)
        report = verify(model)
        assert not report.agrees, form
        assert "DISAGREES" in str(report)


def test_nodes_and_their_provider() -> None:
    report = verify(export_attention(QKV, QKV, QKV, is_causal=True, form="attention"))
    assert [(placed.op, placed.provider) for placed in report.placements] == [
        ("Attention", "CPUExecutionProvider")
    ]
    lengths = {"B=2 L=5", "B=5 L=2", "B=1 L=1"}
    assert {run.inputs for run in report.runs} == lengths | {f"{each}, large scores" for each in lengths}
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


@pytest.mark.parametrize("scale", [1.0, -10.0, 100.0, 0.0])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_right_model_agrees_whatever_its_scale(scale: float, dtype: str) -> None:
    """The samples have scores of size 1, so that the bound is no matter of luck."""
    q, k = TensorSpec(dtype, ("B", 8, "L", 64)), TensorSpec(dtype, ("B", 8, "S", 64))
    model = export_attention(q, k, k, scale=scale)
    for seed in range(8):
        report = verify(model, seed=seed)
        assert report.agrees, report.worst


def test_seeds_draw_different_inputs() -> None:
    model = export_attention(QKV, QKV, QKV)
    one, other = (verify(model, seed=seed).runs[0].agreement.absolute for seed in (0, 1))
    assert one != other


@pytest.mark.parametrize("form", ["attention", "primitive"])
@pytest.mark.parametrize(
    ("key", "rules", "op"),
    [(QKV, {"attn_mask": TensorSpec("bool", ("B", 1, 1, "L"))}, "Where"), (KEY, {"is_causal": True}, "Slice")],
)
def test_a_graph_that_lets_nan_through_is_caught(
    form: str, key: TensorSpec, rules: dict[str, Any], op: str
) -> None:
    """Keys and values without the nodes that blank, or cut off, what no query attends."""
    model = export_attention(QKV, key, key, **rules, form=form)
    assert verify(model).agrees
    guarded = {}
    for node in model.graph.node:
        for name in node.input:
            if node.op_type == op and name in ("key", "value"):
                guarded[node.output[0]] = name
    assert guarded
    for node in model.graph.node:
        node.input[:] = [guarded.get(name, name) for name in node.input]
    if op == "Slice" and form == "primitive":  # the mask was made for the keys that are left
        with pytest.raises(ValueError, match="verify: onnxruntime must run `model`"):
            verify(model)
        return
    assert not verify(model).agrees


def test_a_wrong_dtype_or_shape_disagrees() -> None:
    for op, attributes in (("Cast", {"to": onnx.TensorProto.DOUBLE}), ("Transpose", {"perm": [0, 1, 3, 2]})):
        model = export_attention(QKV, QKV, QKV)
        model.graph.node[-1].output[0] = "inner"
        model.graph.node.append(onnx.helper.make_node(op, ["inner"], ["output"], **attributes))
        if op == "Cast":
            model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        else:
            model.graph.output[0].type.tensor_type.ClearField("shape")
        assert not verify(model).agrees


def broken_node(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "NoSuchOp"


def broken_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "q"


def broken_call(model: onnx.ModelProto) -> None:
    for entry in model.metadata_props:
        if entry.key == "sdpa_xp.call":
            entry.value = entry.value.replace("is_causal", "causal")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (broken_node, "onnxruntime must load `model`.*NoSuchOp"),
        (broken_input, "must have the inputs and outputs of its call"),
        (broken_call, "must be one that export_attention wrote"),
    ],
)
def test_models_that_cannot_be_run(damage: Callable[[onnx.ModelProto], None], words: str) -> None:
    model = export_attention(QKV, QKV, QKV)
    damage(model)
    with pytest.raises(ValueError, match=f"verify: .*{words}"):
        verify(model)


def test_many_symbols() -> None:
    specs = [TensorSpec("float32", (*"ABCDE", 1, "L", 2))] * 3
    assert verify(export_attention(*specs)).agrees


def test_provider_that_does_not_start_is_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime itself only warns, and runs on the CPU."""
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("onnxruntime.InferenceSession.get_providers", lambda _: ["CPUExecutionProvider"])
    monkeypatch.setattr("onnxruntime.preload_dlls", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="onnxruntime could not start CUDAExecutionProvider"):
            verify(export_attention(QKV, QKV, QKV), provider="cuda")


CUDA = "CUDAExecutionProvider"


def test_placements_from_a_profile(tmp_path: Path) -> None:
    def event(category: str, name: str, **details: str) -> dict[str, Any]:
        return {"cat": category, "name": name, "args": details}

    profile = [
        event("Session", "model_run", op_name="none", provider="none"),
        event("Node", "a_fence_before", op_name="MatMul"),
        event("Node", "a_kernel_time", op_name="MatMul", provider="CUDAExecutionProvider"),
        event("Node", "a_kernel_time", op_name="MatMul", provider="CUDAExecutionProvider"),
        event("Node", "b_kernel_time", op_name="Where", provider="CPUExecutionProvider"),
    ]
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert placements(tmp_path / "profile.json", CUDA) == [
        Placement("a", "MatMul", CUDA, CUDA),
        Placement("b", "Where", "CPUExecutionProvider", CUDA),
    ]


def test_a_node_that_fell_back_is_named() -> None:
    report = verify(export_attention(QKV, QKV, QKV, form="attention"))
    assert "fell back" not in str(report)
    placed = tuple(replace(each, requested=CUDA) for each in report.placements)
    assert str(replace(report, placements=placed)).endswith("; fell back: Attention_0")


def test_the_worst_run_speaks_for_the_report() -> None:
    report = verify(export_attention(QKV, QKV, QKV))
    good, *_ = report.runs
    bad = replace(good, agreement=Agreement(2.0, 1.0, 1.0))
    for runs in ((good, bad), (bad, good)):
        both = replace(report, runs=runs)
        assert both.worst is bad
        assert not both.agrees


def test_bound_is_twice_the_own_error_of_the_textbook() -> None:
    exact, plain = np.asarray([2.0, 4.0]), np.asarray([2.0, 4.0 + 2**-10], np.float32)
    found = judge(exact.astype(np.float32), exact, plain, "float32")
    assert found.bound == pytest.approx(2 * 2**-10 + 4 * 2**-23 * 4)
    assert Agreement(1.0, 1.0, 0.0).share == math.inf
    assert Agreement(0.0, 0.0, 0.0).share == 0
