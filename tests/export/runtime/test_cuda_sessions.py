"""Sessions on CUDA: their math mode, their memory, and what happens where CUDA does not start.

A stand-in for onnxruntime takes what a session on CUDA would be opened with, and runs the model on the CPU.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from command import printed, refused
from internals import CPU, CUDA, engine, metadata_of, open_session, providers
from short_runs import agreed, run_each_model_once

from sdpa_xp.layers import SingleHeadAttention
from sdpa_xp_export import TensorSpec, export_attention, save, to_onnx, verify, verify_layer

pytestmark = pytest.mark.usefixtures("few_long_runs")

ROOT = Path(__file__).parents[3]
QKV = TensorSpec("float32", (1, 2, "L", 8))
WITHOUT_TF32 = [(CUDA, {"use_tf32": "0"}), CPU]


@dataclass
class Wheel:
    """What onnxruntime-gpu was asked for, and whether CUDA starts."""

    starts: bool = True
    use_tf32: str | None = None
    """What a session says, whatever it was asked for; None if it does as it was asked."""
    requests: list[Any] = field(default_factory=list)
    arenas: list[str] = field(default_factory=list)


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """Let onnxruntime be the wheel for GPUs, in the process of the tests."""
    state, real = Wheel(), onnxruntime.InferenceSession

    class Session(real):  # type: ignore[misc, valid-type]
        def __init__(self, source: Any, options: Any = None, providers: Any = (), **more: Any) -> None:
            state.requests.append(providers)
            self.wanted = {name: {} for name in providers if isinstance(name, str)}
            self.wanted = {name[0]: name[1] for name in providers if not isinstance(name, str)} | self.wanted
            super().__init__(source, options, providers=[CPU], **more)

        def get_providers(self) -> list[str]:
            return [name for name in self.wanted if name != CUDA or state.starts]

        def get_provider_options(self) -> dict[str, dict[str, str]]:
            default = {"use_tf32": "1"} | self.wanted.get(CUDA, {})
            cuda = default if state.use_tf32 is None else {"use_tf32": state.use_tf32}
            return {name: cuda if name == CUDA else {} for name in self.get_providers()}

    class Options(onnxruntime.RunOptions):  # type: ignore[misc]
        def add_run_config_entry(self, _key: str, value: str) -> None:
            state.arenas.append(value)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "RunOptions", Options)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("Failed to load libcublas"), raising=False)
    return state


def test_every_session_on_cuda_is_without_tf32(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    run_each_model_once(monkeypatch)
    report = agreed(verify(export_attention(QKV, QKV, QKV), provider="cuda"))
    assert {run.provider for run in report.runs} == {CUDA}
    open_session(export_attention(QKV, QKV, QKV, form="primitive"), CUDA)
    assert len(wheel.requests) > 2
    assert all(providers == WITHOUT_TF32 for providers in wheel.requests)


def test_the_report_names_the_math_mode_of_the_session(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    run_each_model_once(monkeypatch)
    model = export_attention(QKV, QKV, QKV)
    report = verify(model)
    assert {run.provider for run in report.runs} == {CUDA, CPU}
    assert report.math_mode == "no TF32"
    assert "math mode: no TF32;" in " ".join(str(report).split())
    wheel.use_tf32 = "1"
    assert verify(model, provider="cuda").math_mode == "TF32"
    assert verify(model).math_mode == "TF32 and no TF32"
    layer = SingleHeadAttention.init(np.random.default_rng(0), 8, 4)
    exported = to_onnx(layer, TensorSpec("float32", ("L", 8)))
    assert verify_layer(exported, layer, provider="cuda").math_mode == "TF32"


def test_metadata_say_which_math_mode_a_file_needs() -> None:
    layer = SingleHeadAttention.init(np.random.default_rng(0), 8, 4)
    for model in (
        export_attention(QKV, QKV, QKV, runtime="onnxruntime>=1.28;cuda"),
        to_onnx(layer, TensorSpec("float32", ("L", 8))),
    ):
        assert metadata_of(model)["sdpa_xp.math"] == "no TF32 (CUDA: use_tf32=0)"


@pytest.mark.parametrize("page", sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]), ids=lambda p: p.name)
def test_no_page_opens_a_session_with_tf32(page: Path) -> None:
    for block in re.findall(r"```python.*?```", page.read_text(), re.DOTALL):
        if "InferenceSession" in block and CUDA in block:
            assert block.count(f'("{CUDA}", {{"use_tf32": "0"}})') >= 1, block


def test_memory_of_the_device_is_given_back_and_not_mistaken_for_the_hosts(wheel: Wheel) -> None:
    x = np.ones((1, 2, 3, 8), np.float32)
    feeds = {"query": x, "key": x, "value": x}
    for provider, arenas in ((CUDA, "cpu:0;gpu:0"), (CPU, "cpu:0")):
        timed = engine.timed(open_session(export_attention(QKV, QKV, QKV), provider), feeds, frees=True)
        assert wheel.arenas.pop() == arenas
        assert provider == CPU or timed.peak_bytes is None


def test_a_run_on_the_cpu_starts_nothing_on_cuda(wheel: Wheel) -> None:
    """It would take seconds, and a driver may hang."""
    assert providers("cpu") == [CPU]
    assert verify(export_attention(QKV, QKV, QKV), provider="cpu").agrees
    assert {*map(str, wheel.requests)} <= {str([CPU])}


@pytest.fixture
def no_gpu(wheel: Wheel) -> Wheel:
    wheel.starts = False
    return wheel


def _nothing_written(capfd: pytest.CaptureFixture[str]) -> None:
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_cpu_is_the_default(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert providers() == [CPU]
        report = verify(export_attention(QKV, QKV, QKV))
    assert report.agrees
    assert {run.provider for run in report.runs} == {CPU}
    (note,) = (note for note in report.notes if "CUDA" in note)
    assert note.startswith(f"onnxruntime offers {CUDA}, but could not start it")
    assert not any(CUDA in note for note in verify(export_attention(QKV, QKV, QKV), provider="cpu").notes)
    _nothing_written(capfd)


def _verify() -> object:
    return verify(export_attention(QKV, QKV, QKV), provider="cuda")


def _providers() -> object:
    return providers("cuda")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("ask", [_verify, _providers])
def test_cuda_that_was_asked_for_stays(ask: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match='Pass `provider="cpu"`'):
        ask()
    _nothing_written(capfd)


@pytest.mark.usefixtures("no_gpu")
def test_the_command_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    path = save(export_attention(QKV, QKV, QKV), tmp_path / "model.onnx")
    out = printed("verify", path)
    assert f"onnxruntime offers {CUDA}, but could not start it" in out
    assert "math mode" not in out  # a CPU has no other
    for flag in ("--provider", "--require-provider"):
        assert f'Pass `{flag}="cpu"` to run on the CPU.' in refused("verify", path, flag, "cuda")
    out = printed("backends")
    assert CUDA not in out
