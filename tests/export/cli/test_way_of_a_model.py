"""On its way from the command to the engine, a model is handed on by few functions, and hardly comes back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import onnx
import pytest
from command import run
from internals import StatedModel, exported_models, process

import sdpa_xp_export
from sdpa_xp_export import TensorSpec, export_attention, save, verify

CARRIERS = onnx.ModelProto | StatedModel
PACKAGE = str(Path(sdpa_xp_export.__file__).parent)
READERS = ("_files", "_runtime")
"""The folders that read a model from its file, and run it; all others only hand it on."""


class OpenedError(Exception):
    """The first session is opened."""


def ours(frame: FrameType | None) -> list[FrameType]:
    """The frame and its callers that are code of the exporter, the innermost first."""
    if frame is None:
        return []
    return [frame][not frame.f_code.co_filename.startswith(PACKAGE) :] + ours(frame.f_back)


def room(frame: FrameType) -> str:
    """The folder of a function; public functions have one together."""
    parts = Path(frame.f_code.co_filename).relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "*.py"


def test_few_functions_hand_a_model_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = TensorSpec("float32", (1, 1, 3, 8))
    path = save(export_attention(qkv, qkv, qkv, is_causal=True), tmp_path / "causal.onnx")
    rooms, stack = list[str](), list[str]()

    def has_model(frame: FrameType) -> bool:
        known = [x for x in frame.f_locals.values() if isinstance(x, CARRIERS | str | Path)]
        return any(isinstance(x, CARRIERS) or str(x) == str(path) for x in known)

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and has_model(frame):
            both = [room(one) for one in ours(frame)[1::-1]] if has_model(ours(frame)[1]) else []
            rooms.extend(name for name in both if name not in READERS and [name] != rooms[-1:])

    def session(*_: object) -> Any:
        sys.setprofile(None)
        stack.extend(frame.f_code.co_name for frame in ours(sys._getframe(1)))
        raise OpenedError

    monkeypatch.setattr(process.RuntimeProcess, "session", session)
    sys.setprofile(watch)
    with pytest.raises(OpenedError):
        run("verify", path)
    assert stack[: stack.index("run_verify") + 1] == ["run", "verify", "run_verify"]
    assert rooms == ["cli", "*.py", "_verify", "*.py", "_verify"]  # read, then run: two returns


@pytest.mark.usefixtures("short_verify")
def test_what_a_model_states_is_read_once() -> None:
    """Its call, its runtimes, its form and an earlier verdict are of one reading."""
    qkv, readers = TensorSpec("float32", (1, 1, 3, 8)), list[str]()
    model, another = export_attention(qkv, qkv, qkv, is_causal=True), {"query": qkv, "key": qkv, "value": qkv}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is exported_models.__code__:
            readers.append(ours(frame)[1].f_code.co_qualname)

    sys.setprofile(watch)
    try:
        assert not verify(model, call=another, seed=0).agrees  # so the report also says what the model states
    finally:
        sys.setprofile(None)
    assert readers == ["StatedModel.from_model"]
