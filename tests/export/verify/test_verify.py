"""`verify` tells a right model from a wrong one, and says where each node ran."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from internals import Case, checked_call, judge_outputs, trials
from onnx import numpy_helper
from short_runs import agreed, assert_right

from sdpa_xp_export import TensorSpec, export_attention, verify
from sdpa_xp_export.report import Agreement, Placement, Report

QKV = TensorSpec("float32", ("B", 4, "L", 16))
FIXED = TensorSpec("float32", (2, 4, 5, 16))
KEY = TensorSpec("float32", ("B", 4, "S", 16))
FUSED = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
MASK = TensorSpec("bool", ("B", 1, "L", "L"))


@pytest.mark.usefixtures("few_long_runs")
def test_nodes_and_their_provider() -> None:
    report = verify(export_attention(QKV, QKV, QKV, is_causal=True, form="attention"))
    assert [(x.op, x.provider) for x in report.placements] == [("Attention", "CPUExecutionProvider")]
    assert report.nodes == "1 node, on CPUExecutionProvider"
    assert {"B=2 L=5", "B=7 L=19, large scores", "B=5 L=2, huge scores"} <= {run.inputs for run in report.runs}
    assert all(run.provider == "CPUExecutionProvider" and run.seconds > 0 for run in report.runs)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("scale", [1.0, -10.0, 100.0, 0.0])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_right_model_agrees_whatever_its_scale(scale: float, dtype: str) -> None:
    """The samples have scores of size 1, so that the bound is no matter of luck."""
    q, k = TensorSpec(dtype, ("B", 8, "L", 64)), TensorSpec(dtype, ("B", 8, "S", 64))
    model = export_attention(q, k, k, scale=scale)
    for seed in range(8):
        assert_right(model, seed=seed)


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_scale_whose_numbers_are_in_the_file(dtype: str) -> None:
    q = TensorSpec(dtype, ("B", 4, "L", 16))
    for scale in ([1.0, 0.5, -0.25, 0.0], [2.0**-12] * 4, [300.0] * 4):
        report = agreed(verify(export_attention(q, q, q, scale=np.asarray(scale, dtype).reshape(4, 1, 1))))
        assert any("low scores" in run.inputs for run in report.runs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_that_are_returned_fit_their_dtype(dtype: str) -> None:
    q = TensorSpec(dtype, (1, 2, 5, 8))
    report = agreed(verify(export_attention(q, q, q, outputs=("output", "scores"))))
    assert any("low scores" in run.inputs for run in report.runs) == (dtype != "float16")


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("form", ["attention", "primitive"])
@pytest.mark.parametrize(
    ("key", "rules", "op"),
    [(QKV, {"attn_mask": TensorSpec("bool", ("B", 1, 1, "L"))}, "Where"), (KEY, {"is_causal": True}, "Slice")],
)
def test_a_graph_that_lets_nan_through(form: str, key: TensorSpec, rules: dict[str, Any], op: str) -> None:
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
        with pytest.raises(ValueError, match="must run `model`"):
            verify(model)
        return
    assert not verify(model).agrees


@pytest.mark.usefixtures("short_verify")
def test_a_wrong_shape_disagrees() -> None:
    model = export_attention(QKV, QKV, QKV)
    model.graph.node[-1].output[0] = "inner"
    model.graph.node.append(onnx.helper.make_node("Transpose", ["inner"], ["output"], perm=[0, 1, 3, 2]))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert not verify(model).agrees


@pytest.mark.usefixtures("short_verify")
def test_many_symbols() -> None:
    specs = [TensorSpec("float32", (*"ABCDE", 1, "L", 2))] * 3
    assert verify(export_attention(*specs)).agrees


SINKS = np.linspace(-1, 1, 4, dtype=np.float32)


@pytest.mark.usefixtures("short_verify")
class TestAgainstACallThatIsWrittenDown:
    """Nothing in the file is trusted, neither its metadata nor its numbers."""

    CALL: ClassVar[dict[str, Any]] = dict.fromkeys(("query", "key", "value"), FIXED)
    CALL |= {"sinks": SINKS, "is_causal": True}

    def test_the_same_call(self) -> None:
        model = export_attention(**self.CALL)
        report = agreed(verify(model, call=self.CALL))
        assert not report.from_metadata
        del model.metadata_props[:]
        assert verify(model, call=self.CALL).agrees

    @pytest.mark.parametrize("other", [{"sinks": SINKS * 1.001}, {"is_causal": False}, {"scale": 0.251}])
    def test_another_call(self, other: dict[str, Any]) -> None:
        model = export_attention(**self.CALL | other)
        assert verify(model).agrees
        report = verify(model, call=self.CALL)
        assert not report.agrees
        stated, wanted = {"is_causal": (False, True), "scale": (0.251, 0.25)}.get(*other, (None, None))
        expected = [f"the metadata of the model state {n}={stated}, and `call` has {n}={wanted}" for n in other]
        assert report.notes == (() if stated is None else tuple(expected))

    @pytest.mark.parametrize(
        "text",
        ["", "[", "[1]", '"call"', '{"is_causal": "\\u001b[31m"}', pytest.param("[" * 10**6, id="nested")],
    )
    def test_another_call_in_a_file_of_anyone(self, text: str) -> None:
        """What it says is shown without control characters, or not at all."""
        model = export_attention(**self.CALL | {"is_causal": False})
        for entry in model.metadata_props:
            entry.value = text if entry.key.startswith("sdpa_xp.call.") else entry.value
        notes = verify(model, call=self.CALL).notes
        assert len(notes) == text.startswith("{")
        assert all(note.isprintable() and r"is_causal='\x1b[31m'" in note for note in notes)

    def test_numbers_that_are_no_longer_those_of_the_metadata(self) -> None:
        model = export_attention(**self.CALL)
        (sinks,) = (tensor for tensor in model.graph.initializer if tensor.name == "sinks")
        sinks.CopyFrom(numpy_helper.from_array(SINKS * np.float32(1.5), "sinks"))
        with pytest.raises(ValueError, match="their digest differs"):
            verify(model)
        assert not verify(model, call=self.CALL).agrees


@pytest.mark.usefixtures("short_verify")
def test_watch_counts_the_runs() -> None:
    steps: list[tuple[int, int, str]] = []
    report = verify(export_attention(QKV, QKV, QKV), watch=lambda *step: steps.append(step))
    assert [done for done, _, _ in steps] == list(range(1, len(report.runs) + 1))
    assert {total for _, total, _ in steps} == {len(report.runs)}
    assert steps[0][2] == "B=2 L=5 on CPUExecutionProvider"


def test_hostile_names_stay_out_of_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """onnxruntime writes errors to its log, with names that a file may hold; here they are only raised."""
    fixed = TensorSpec("float32", (1, 2, "L", 8))
    model = export_attention(fixed, fixed, fixed, form="primitive")
    model.graph.node[0].name = "\x1b[31mevil"
    wrong = onnx.helper.make_node("Reshape", ["output_", "no_shape"], ["output"], name="\x1b[31mevil_too")
    model.graph.node[-1].output[0] = "output_"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray([3, 5, 7]), "no_shape"))
    model.graph.node.append(wrong)
    with pytest.raises(ValueError, match=r"must (load|run) `model`"):
        verify(model)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


CUDA = "CUDAExecutionProvider"


@cache
def plain_report() -> Report:
    return verify(export_attention(QKV, QKV, QKV))


@pytest.mark.usefixtures("short_verify")
def test_a_node_that_fell_back_is_named() -> None:
    report = plain_report()
    assert "fell back" not in str(report)
    placed = Placement("Attention_0", "Attention", "CPUExecutionProvider", CUDA)
    assert str(replace(report, placements=(placed,))).split()[-3:] == ["fell", "back:", "Attention_0"]


@pytest.mark.usefixtures("short_verify")
def test_the_worst_run_speaks_for_the_report() -> None:
    report = plain_report()
    good, *_ = report.runs
    bad = replace(good, agreement=Agreement(2.0, 1.0, 1.0))
    for runs in ((good, bad), (bad, good)):
        both = replace(report, runs=runs)
        assert both.worst is bad
        assert not both.agrees


@pytest.mark.usefixtures("short_verify")
def test_ordinary_inputs_come_before_special_ones() -> None:
    report = plain_report()
    assert all(run.is_plain == (", " not in run.inputs) for run in report.runs)
    special, plain = "q[2,3], large tokens", "q[2,3] k[2,4]"
    runs = [
        replace(
            report.runs[0], inputs=inputs, is_plain=error < 100, agreement=Agreement(error, error / 8e6, 1e3)
        )
        for inputs, error in ((plain, 10.0), (special, 800.0))
    ]
    closest = f"closest to its bound: output of {plain}, error 10, bound 1e+03;"
    beside = f"with special inputs: output of {special}, error 8e+02 on values up to 8e+06, bound 1e+03;"
    for order in (runs, runs[::-1]):
        assert f"{closest} {beside}" in " ".join(str(replace(report, runs=tuple(order))).split())
    calm = replace(runs[1], agreement=Agreement(0.0, 0.0, 1e3))
    lines = " ".join(str(replace(report, runs=(runs[0], calm))).split())
    assert closest in lines
    assert "with special inputs" not in lines
    alone = " ".join(str(replace(report, runs=(calm,))).split())
    assert f"closest to its bound: output of {special}, error 0, bound 1e+03;" in alone
    beyond = replace(runs[1], agreement=Agreement(math.inf, math.inf, 1e3))
    lines = " ".join(str(replace(report, runs=(runs[0], beyond))).split())
    assert f"furthest beyond its bound: output of {special}, error inf, bound 1e+03;" in lines
    *_, table = ElementTree.fromstring(replace(report, runs=tuple(runs))._repr_html_()).iter("tbody")
    assert [[cell.text for cell in row][1:] for row in table] == [
        ["8.0e+02", "1.0e+03", "8e+06"],
        ["1.0e+01", "1.0e+03", "8e+06"],
    ]


@pytest.mark.usefixtures("short_verify")
def test_a_notebook_shows_the_verdict_and_the_closest_runs() -> None:
    report = replace(plain_report(), left_out=("P > 3",))
    good, *_ = report.runs
    bad = replace(good, agreement=Agreement(2.0, 1.0, 1.0), inputs="<L>=7")
    facts, runs = ElementTree.fromstring(replace(report, runs=(good, bad))._repr_html_()).iter("tbody")
    assert ["form", report.form] in [[cell.text for cell in row] for row in facts]
    assert ["why this form", report.reason] in [[cell.text for cell in row] for row in facts]
    assert ["not tried", "P > 3"] in [[cell.text for cell in row] for row in facts]
    assert [row[0].text for row in runs] == ["<L>=7", good.inputs]
    assert "Report: agrees in " in report._repr_html_()
    assert "Report: DISAGREES in 2 runs" in replace(report, runs=(good, bad))._repr_html_()
    exact = replace(good, agreement=Agreement(0.0, 0.0, 1e-6))
    assert "<td>0</td><td>1.0e-06</td>" in replace(report, runs=(exact,))._repr_html_()
    for text in (str(report), report._repr_html_()):  # onnxruntime on a CPU has no other mode
        assert "math mode" not in text
    other = replace(report, math_mode="TF32")
    assert "math mode: TF32;" in " ".join(str(other).split())
    assert "<th>math mode</th><td>TF32</td>" in other._repr_html_()
    ran = f"on onnxruntime {report.onnxruntime}, seed={report.seed}>"
    assert repr(replace(report, runs=(good,))) == f"<Report: {report.form} agrees in 1 runs {ran}"
    assert repr(replace(report, runs=(good, bad))) == f"<Report: {report.form} DISAGREES in 2 runs {ran}"


def test_the_share_of_a_bound_of_0() -> None:
    assert Agreement(1.0, 1.0, 0.0).share == math.inf
    assert Agreement(0.0, 0.0, 0.0).share == 0


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_one_run_is_judged(error: float) -> None:
    call = checked_call("test", FIXED, FIXED, FIXED, is_causal=True)
    (trial,) = trials(call, [Case({})], np.random.default_rng(0), computed_in="float32")
    exact = trial.expected["output"].reference
    assert exact.shape == FIXED.shape
    results = {"output": (exact + error).astype(np.float32)}
    (agreement,) = judge_outputs([trial.compared(results)], "float32")["output"]
    assert agreement.agrees == (error == 0)
