"""`verify` and `verify_layer` on the providers of browsers: WebAssembly in Node.js, and WebGPU by a plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import hostile_models as hostile
import onnx
import pytest
from browsers import MODULES, use_wasm, use_webgpu
from internals import ModelFailedError, Runtime
from short_runs import agreed

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify, verify_layer

QKV = TensorSpec("float32", (1, 2, 40, 16))
CPU, WEBGPU = "CPUExecutionProvider", "WebGpuExecutionProvider"


@pytest.fixture
def models_share_a_process() -> None:
    """Each model has a process of its own: the one that tests share has another environment."""


@pytest.fixture
def wasm(monkeypatch: pytest.MonkeyPatch) -> None:
    use_wasm(monkeypatch)


@pytest.fixture
def webgpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_webgpu(monkeypatch)


def exported(runtime: str, **said: Any) -> onnx.ModelProto:
    return cast(onnx.ModelProto, export_attention(QKV, QKV, QKV, runtime=f"onnxruntime>={runtime}", **said))


@pytest.mark.usefixtures("wasm", "few_long_runs")
@pytest.mark.parametrize("form", ["attention", "tiled"])
def test_wasm(form: str) -> None:
    mask = {"attn_mask": masks.sliding_window(3, 0)} if form == "tiled" else {}
    report = agreed(verify(exported("1.31;wasm", form=form, **mask), provider="wasm", seed=0))
    assert report.onnxruntime == json.loads((MODULES / "onnxruntime-web/package.json").read_text())["version"]
    assert {placed.provider for placed in report.placements} == {"wasm"}
    assert report.fell_back == ()
    assert {run.provider for run in report.runs} == {"wasm"}
    assert all(run.peak_bytes is None for run in report.runs)


@pytest.mark.usefixtures("wasm", "few_long_runs")
def test_wasm_notices_a_wrong_model_and_what_it_cannot_load() -> None:
    model = exported("1.28;wasm", form="primitive")
    (node,) = (node for node in model.graph.node if node.op_type == "Softmax")
    node.op_type = "LogSoftmax"
    assert not verify(model, provider="wasm", seed=0).agrees
    node.op_type = "NoSuchOperator"
    with pytest.raises(ModelFailedError, match=r"^verify: onnxruntime must load `model`.*NoSuchOperator"):
        verify(model, provider="wasm", seed=0)
    bfloat16 = TensorSpec("bfloat16", (1, 2, 3, 8))
    with pytest.raises(ModelFailedError, match=r"must (load|run) `model`.*bfloat16"):
        verify(export_attention(bfloat16, bfloat16, bfloat16, form="primitive"), provider="wasm")


@pytest.mark.usefixtures("wasm")
def test_a_model_that_hangs_in_node_ends_with_the_time() -> None:
    with pytest.raises(ModelFailedError, match=r"must run `model` within the limit of time"):
        verify(hostile.endless_loop(), provider="wasm", timeout=4)


@pytest.mark.usefixtures("wasm", "few_long_runs")
def test_a_layer_on_wasm() -> None:
    """Arrays of several dtypes travel to Node.js and back, empty ones among them."""

    def layer(x: Any, past: Any, keeps: Any) -> Any:
        xp = x.__array_namespace__()
        return xp.concat([past, x], axis=0), xp.astype(x, "int64"), ~keeps

    specs = TensorSpec("float16", ("L", 3)), TensorSpec("float16", ("P", 3)), TensorSpec("bool", ("L",))
    report = agreed(
        verify_layer(to_onnx(layer, *specs, runtime="onnxruntime>=1.28;wasm"), layer, provider="wasm")
    )
    assert any("P=0" in run.inputs for run in report.runs)


@pytest.mark.usefixtures("webgpu", "few_long_runs")
def test_webgpu() -> None:
    """Softmax there gives 0 for a row with a NaN, so that a graph for the CPU is wrong."""
    said: dict[str, Any] = {"form": "primitive", "is_causal": True}
    report = agreed(verify(exported("1.28;webgpu", **said), provider="webgpu", seed=0))
    assert {placed.provider for placed in report.placements} == {WEBGPU}
    assert [note for note in report.notes if "computed WebGPU on a software adapter" in note] == [*report.notes]
    report = verify(exported("1.28;cpu", **said), provider=WEBGPU, seed=0)
    assert not report.agrees
    assert all("NaN" in run.inputs for run in report.runs if not run.agreement.agrees)
    assert f"the file is for onnxruntime>=1.28;cpu: results on {WEBGPU} are not promised" in report.notes


@pytest.mark.usefixtures("webgpu", "few_long_runs")
def test_webgpu_notices_the_operators_that_it_computes_wrong() -> None:
    """From 32 tokens on; when a release mends them, they need not be refused any more."""
    assert not verify(exported("1.28;cpu", form="multi_head"), provider="webgpu", seed=0).agrees


def test_which_files_are_promised_on_which_providers() -> None:
    """WebAssembly has the kernels of the CPU, and `web` is right on both."""
    promised = {"cpu": {CPU, "wasm"}, "wasm": {CPU, "wasm"}, "webgpu": {WEBGPU}, "web": {CPU, "wasm", WEBGPU}}
    for provider, right in promised.items():
        runtime = Runtime.parse("verify", f"onnxruntime>=1.28;{provider}")
        for name in (CPU, "wasm", WEBGPU, "CUDAExecutionProvider"):
            why = f"the file is for {runtime}: results on {name} are not promised"
            assert runtime.other_provider_note([name]) == ("" if name in right else why)


@pytest.mark.usefixtures("short_verify")
def test_a_provider_that_did_not_run_a_file_for_both_is_named() -> None:
    """The CPU stands for WebAssembly, and for nothing else."""
    note = "the file is for onnxruntime>=1.28;web, and was not run on webgpu"
    assert note in verify(exported("1.28;web")).notes
    web, wasm = (Runtime.parse("verify", f"onnxruntime>=1.28;{name}") for name in ("web", "wasm"))
    assert web.not_run_note([WEBGPU]).endswith("was not run on wasm")
    assert web.not_run_note([WEBGPU, CPU]) == web.not_run_note([WEBGPU, "wasm"]) == ""
    assert wasm.not_run_note([CPU]) == wasm.not_run_note([WEBGPU]) == ""


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = exported("1.28;web")
    (tmp_path / "onnxruntime_ep_webgpu.py").write_text("raise ImportError('No module of that name')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="Run `pip install"):
        verify(model, provider="webgpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="and run `npm install"):
        verify(model, provider="wasm")


@pytest.mark.usefixtures("wasm")
def test_node_without_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NODE_PATH")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Cannot find module 'onnxruntime-web'"):
        verify(exported("1.28;web"), provider="wasm")


def test_other_providers_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="It may be cpu, cuda, wasm, webgpu"):
        verify(exported("1.28;web"), provider=cast(Any, "gpu"))
    with pytest.raises(ValueError, match="It may be cpu, cuda, wasm, webgpu"):
        verify(exported("1.28;web"), provider=cast(Any, ["cpu"]))
    with pytest.raises(ValueError, match="The nearest is 'wasm'"):
        verify(exported("1.28;web"), provider=cast(Any, "wsm"))
