"""Other engines than onnxruntime: what `verify` runs in them, and how it says what they cannot do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import printed, run
from feature_calls import features
from internals import override
from short_runs import agreed

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, save, to_onnx, verify, verify_layer
from sdpa_xp_export.export import export_call

X = TensorSpec("float32", ("B", 2, "L", 8))
RUNTIMES = {"reference": "onnx", "openvino": "openvino>=2026.4;cpu"}
ENGINES = ["reference", pytest.param("openvino", marks=pytest.mark.needs("openvino"))]
# Calls whose graphs have something that one of the engines was seen to compute wrong. All are run, with fewer
# kinds of inputs, by quality/runtime/test_onnx_reference.py and test_openvino.py.
CALLS = [
    ("mask: padding and causal", "bfloat16"),
    ("lse, padding, sinks", "float32"),
    ("weights", "float32"),
    ("bias: alibi", "float16"),
    ("long, window", "float32"),
]


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize(("name", "dtype"), CALLS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_graph_for_the_engine_is_right_there(engine: str, name: str, dtype: str) -> None:
    report = agreed(verify(export_call(features(dtype)[name], runtime=RUNTIMES[engine]), engine=engine))
    assert not report.notes


@pytest.mark.parametrize("engine", ENGINES)
def test_the_report_names_the_engine(engine: str) -> None:
    """In a process of its own, as a user has it."""
    model = export_attention(X, X, X, is_causal=True, runtime=RUNTIMES[engine])
    report = agreed(verify(model, engine=engine, seed=0))
    name = {"reference": f"ONNX's reference evaluator {onnx.__version__}", "openvino": "OpenVINO 2026."}[engine]
    assert report.engine.startswith(name)
    assert f"runs on {name}" in " ".join(str(report).split())
    assert report.onnxruntime == ""
    assert report.placements
    assert not report.fell_back
    if engine == "openvino":
        assert report.math_mode.startswith("float32 (OpenVINO: INFERENCE_PRECISION_HINT=f32, its default ")


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_model_disagrees(engine: str) -> None:
    model = export_attention(X, X, X, runtime=RUNTIMES[engine])
    for node in model.graph.node:
        if node.op_type == "Softmax":
            node.attribute[0].i = -2
    for loop in model.graph.node:
        for body in (attribute.g for attribute in loop.attribute if attribute.name == "body"):
            for node in body.node:
                if node.op_type == "Softmax":
                    node.attribute[0].i = -2
    assert not verify(model, engine=engine).agrees


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer(engine: str) -> None:
    def layer(x: Any) -> Any:
        return scaled_dot_product_attention(x * 2, x, x, is_causal=True)

    agreed(verify_layer(to_onnx(layer, X, runtime=RUNTIMES[engine]), layer, engine=engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_form_that_the_engine_cannot_read_is_one_line(engine: str) -> None:
    fixed = TensorSpec("float32", (1, 2, 16, 8))
    model = export_attention(fixed, fixed, fixed, is_causal=True, form="grouped_query")
    with pytest.raises(ValueError, match=r"^verify: .* must load `model`; .*GroupQueryAttention") as caught:
        verify(model, engine=engine)
    assert "\n" not in str(caught.value)
    assert "the file is for onnxruntime>=1.28;cpu, and not for" in str(caught.value)


@pytest.mark.usefixtures("short_verify")
def test_float64_as_the_standard_has_it() -> None:
    """onnxruntime computes a float64 Attention to float32 accuracy."""
    double, half = TensorSpec("float64", ("B", 2, "L", 8)), TensorSpec("float16", ("B", 2, "L", 8))
    bias = TensorSpec("float64", ("B", 1, "L", "L"))
    window = masks.sliding_window(3, 0) & masks.padding(TensorSpec("int64", ("B",)))
    for said in (
        {"is_causal": True, "scale": 0.3, "softcap": 2.0},
        {"attn_mask": window},
        {"bias": bias, "scale": -0.7},
    ):
        report = verify(
            export_attention(double, double, double, **said, form="attention", runtime="onnx"),
            engine="reference",
        )
        assert (report.form, report.computed_in, report.agrees) == ("attention", "float64", True), str(report)
    said = {"softmax_dtype": "float64", "form": "attention"}
    assert verify(export_attention(half, half, half, **said, runtime="onnx"), engine="reference").agrees


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "openvino", raising=False)
    override(monkeypatch, "find_spec", lambda _name: None)
    words = r"^verify: openvino must be installed; .* pip install '\.\[openvino\]'"
    with pytest.raises(ModuleNotFoundError, match=words):
        verify(export_attention(X, X, X), engine="openvino")


IDS = TensorSpec("int64", ("L",))


@pytest.mark.needs("openvino")
@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint8"])
@pytest.mark.usefixtures("short_verify")
def test_small_integers_in_openvino(dtype: str) -> None:
    """OpenVINO takes a shift by 32 bits for one by 0, and rounds where it divides bytes."""

    def layer(x: Any) -> Any:
        xp = x.__array_namespace__()
        ends = xp.max(x, axis=-1), xp.min(x, axis=-1), xp.argmax(x, axis=-1), xp.argmin(x, axis=-1)
        return *ends, x // 2, x % 3, xp.sum(x, axis=-1), xp.cumulative_sum(x, axis=-1)

    model = to_onnx(layer, TensorSpec(dtype, ("B", "L")), runtime=RUNTIMES["openvino"])
    agreed(
        verify_layer(model, layer, engine="openvino", draw={"x": lambda rng, shape: rng.integers(0, 9, shape)})
    )


@pytest.mark.needs("openvino")
@pytest.mark.usefixtures("short_verify")
def test_integers_beyond_32_bits_are_left_out() -> None:
    def layer(x: Any) -> Any:
        return x * 2 + 1

    report = agreed(verify_layer(to_onnx(layer, IDS, runtime=RUNTIMES["openvino"]), layer, engine="openvino"))
    assert "large integers in x: OpenVINO computes integers in 32 bits" in report.left_out


def test_command(tmp_path: Path) -> None:
    path = save(export_attention(X, X, X, runtime="onnx"), tmp_path / "a.onnx")
    out = printed("verify", path, "--engine", "reference", "--require-runtime")
    assert f"runs on ONNX's reference evaluator {onnx.__version__}\n" in out
    other = save(export_attention(X, X, X, form="primitive"), tmp_path / "b.onnx")
    code, out, _ = run("verify", other, "--engine", "reference", "--require-runtime")
    assert code == 1
    assert "FAILS: the file is for onnxruntime>=1.28;cpu, and not for ONNX's reference evaluator" in out
