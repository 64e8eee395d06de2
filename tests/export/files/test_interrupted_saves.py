"""An interrupt at any line of `save`, or at any step of Python, leaves nothing behind and nothing open."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from internals import PathArgument, exporter_files, publish
from interrupts import Interrupted

from sdpa_xp_export import TensorSpec, export_attention, save

# Where a line of `with` is interrupted, the file is closed as nothing refers to it, and Python warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

FOLDER = Path(exporter_files.__file__).parent
FILES = str(FOLDER), str(FOLDER.with_name("save.py"))
QKV = TensorSpec("float32", ("B", 2, 2, 4))
OLD = export_attention(QKV, QKV, QKV, bias=np.zeros((2, 2, 2), np.float32))
NEW = export_attention(QKV, QKV, QKV, bias=np.ones((2, 2, 2), np.float32))
CASES: dict[str, dict[str, Any]] = {
    "new": {},
    "new, with data": {"external_above": 0},
    "replaced": {"overwrite": True},
    "replaced, with data": {"overwrite": True, "external_above": 0},
}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_folder(folder: Path, old: onnx.ModelProto | None, came: str) -> None:
    """The model is the old or the new one, its data beside it, and nothing else."""
    names = sorted(os.listdir(folder))
    model = None
    if "a.onnx" in names:
        model = onnx.load(folder / "a.onnx")
        for tensor in model.graph.initializer:
            tensor.ClearField("data_location")
        loaded = onnx.load(folder / "a.onnx", load_external_data=False).graph.initializer
        data = {entry.value for tensor in loaded for entry in tensor.external_data if entry.key == "location"}
        assert names == sorted({"a.onnx", *data}), came
    else:
        assert names == [], came
    assert model in (old, NEW), came


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is most of the time of thousands of saves; the call is a step as before."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def sweep(folder: Path, case: str, *, opcodes: bool = False, step: int = 1, every: int = 1) -> int:
    """Interrupt one of `every` steps of a save, from `step` on; return how many steps there are."""
    while True:
        inner = folder / str(step)
        inner.mkdir()
        old = OLD if "replaced" in case else None
        if old:
            save(old, inner / "a.onnx", external_above=0)
        before = open_files()
        interrupted = Interrupted(step, *FILES, opcodes=opcodes)
        interrupted(lambda inner=inner: save(NEW, inner / "a.onnx", **CASES[case]))  # type: ignore[misc]
        assert open_files() == before, interrupted.came
        check_folder(inner, old, interrupted.came)
        if not interrupted.came:
            return interrupted.steps
        step += every


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="it counts descriptors in /proc")


@needs_linux
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line(tmp_path: Path, case: str) -> None:
    assert sweep(tmp_path, case) > 100


@needs_linux
@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("first", range(1, 36, 7))
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_step_of_the_interpreter(tmp_path: Path, case: str, first: int) -> None:
    """Together the cases interrupt one of seven."""
    assert sweep(tmp_path, case, opcodes=True, step=first, every=35) > 500


@needs_linux
def test_an_interrupt_where_a_file_system_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the name is taken by an empty file for a moment."""

    def no_links(*_: object) -> None:
        raise OSError(1, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert sweep(tmp_path, "new") > 100


@needs_linux
def test_an_interrupt_of_a_page(tmp_path: Path) -> None:
    page, step = tmp_path / "page.html", 1
    while True:
        page.write_text("old")
        before, interrupted = open_files(), Interrupted(step, *FILES)
        interrupted(lambda: publish(b"new", page, PathArgument("verify", "html"), overwrite=True))
        assert open_files() == before, interrupted.came
        assert page.read_text() in ("old", "new")
        assert os.listdir(tmp_path) == ["page.html"], interrupted.came
        if not interrupted.came:
            break
        step += 1
    assert step > 50
