"""A model is written whole or not at all, and never over another file unless told to."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest

from sdpa_xp_export import TensorSpec, export_attention, save

MODEL = export_attention(*[TensorSpec("float32", (2, 4))] * 3)


def test_saved_model_is_the_model(tmp_path: Path) -> None:
    path = save(MODEL, tmp_path / "a.onnx")
    assert onnx.load(path) == MODEL
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]


def test_never_over_another_file(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"save: `path` must not exist.*a\.onnx.*overwrite=True"):
        save(MODEL, path)
    assert path.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1
    save(MODEL, path, overwrite=True)
    assert onnx.load(path) == MODEL


def test_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert save(MODEL, tmp_path / "a.onnx").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.onnx").write_text("mine")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save(MODEL, tmp_path / "a.onnx", overwrite=True)
    assert (tmp_path / "a.onnx").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="`path` must be a file"):
        save(MODEL, tmp_path)
    with pytest.raises(FileNotFoundError, match="folder of `path` must exist"):
        save(MODEL, tmp_path / "none" / "a.onnx")


def test_a_link_stays_a_link_and_no_device_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "a.onnx").symlink_to(tmp_path / "real" / "a.onnx")
    save(MODEL, tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").is_symlink()
    assert onnx.load(tmp_path / "real" / "a.onnx") == MODEL
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="`path` must be a file"):
        save(MODEL, tmp_path / "pipe", overwrite=True)
