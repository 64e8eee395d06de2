"""No output of a command or of `save` is one of its inputs, under whatever name; and what an input may be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import QKV, refused, run
from internals import Weight

from sdpa_xp_export import LargeModel, TensorSpec, export_attention, save
from sdpa_xp_export.cli import export as export_command

MODEL = export_attention(*[TensorSpec("float32", ("B", 2, "L", 8))] * 3)
TOML = 'query = "float32[B,8,L,64]"\nkey = "float32[B,2,L,64]"\n'


def by_a_link(path: Path, name: str = "link") -> Path:
    path.with_name(name).symlink_to(path.name)
    return path.with_name(name)


def in_a_linked_folder(path: Path) -> Path:
    folder = path.parent.with_name("linked")
    folder.symlink_to(path.parent)
    return folder / path.name


Spelling = Callable[[Path], Path]
SPELLINGS: dict[str, Spelling] = {
    "itself": lambda path: path,
    "spelt otherwise": lambda path: path.parent / "." / ".." / path.parent.name / path.name,
    "relative": lambda path: Path(os.path.relpath(path)),
    "a link": lambda path: by_a_link(path),
    "two links": lambda path: by_a_link(by_a_link(path), "second"),
    "a hard link": lambda path: os.link(path, path.with_name("other")) or path.with_name("other"),
    "a linked folder": in_a_linked_folder,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def with_data(folder: Path) -> tuple[Path, Path]:
    """A model with its data in a file."""
    qkv = TensorSpec("float32", ("B", 2, 64, 8))
    model = export_attention(qkv, qkv, qkv, bias=np.ones((2, 64, 64), np.float32))
    path = save(model, folder / "a.onnx", external_above=0)
    return path, next(folder.glob("*.data"))


def toml(folder: Path, text: str = TOML) -> Path:
    (folder / "call.toml").write_text(text)
    return folder / "call.toml"


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_page_is_not_written_over_the_model(folder: Path, spelling: Spelling) -> None:
    """Whichever of the two is named otherwise, with `--force` and without."""
    path = save(MODEL, folder / "a.onnx")
    other = spelling(path)
    for model, page, *force in ([path, other], [path, other, "--force"], [other, path, "--force"]):
        assert "must not be the model" in refused("verify", model, "--html", page, *force)
    assert onnx.load(path) == MODEL


def test_other_inputs_are_not_written_over(folder: Path) -> None:
    """The data of a model, the call of `verify`, and the settings of an export; also by a key of these."""
    (path, data), call = with_data(folder), toml(folder)
    data_as, call_as = by_a_link(data), in_a_linked_folder(call)
    config = toml(folder, TOML + f"output = '{call}'\n")
    before = [file.read_bytes() for file in (path, data, config)]
    for arguments in (
        ("verify", path, "--html", data_as),
        ("verify", path, "--call", call, "--html", call_as),
        ("export", "--config", config, "--output", call_as),
        ("export", "--config", config),
    ):
        assert "must not be the" in refused(*arguments, "--force")
    assert [file.read_bytes() for file in (path, data, config)] == before


def test_other_files_may_be_replaced(folder: Path) -> None:
    path, page = save(MODEL, folder / "a.onnx"), folder / "page.html"
    page.touch()
    assert run("verify", path, "--html", page, "--force")[0] == 0
    assert run("export", *QKV, "--output", page, "--force")[0] == 0


def mapped(file: Path, name: str) -> LargeModel:
    """A model that refers to an array in a file."""
    np.save(file, np.ones((1100, 1100), np.float32))
    array = np.load(file, mmap_mode="r")
    return LargeModel(MODEL, {name: Weight(name, array[:, ::2].T)})


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_save_does_not_replace_what_the_model_is_read_from(folder: Path, spelling: Spelling) -> None:
    file = folder / "weights.npy"
    model = mapped(file, "w")
    before = file.read_bytes()
    with pytest.raises(FileExistsError, match="numbers of `model`"):
        save(model, spelling(file), overwrite=True)
    assert file.read_bytes() == before


def test_save_does_not_replace_the_data_of_a_model(folder: Path) -> None:
    path, data = with_data(folder)
    model = onnx.load(path)
    with pytest.raises(FileExistsError, match="the data of"):
        save(model, data, overwrite=True)
    path.unlink()
    assert save(model, data, overwrite=True) == data  # it belongs to nothing


ENCODED = {
    "mark": TOML.encode("utf-8-sig"),
    "utf-16": TOML.encode("utf-16"),
    "big-endian": b"\xfe\xff" + TOML.encode("utf-16-be"),
    "Windows": TOML.replace("\n", "\r\n").encode("utf-8-sig"),
}


@pytest.mark.parametrize("encoded", ENCODED.values(), ids=ENCODED)
def test_settings_as_editors_of_windows_write_them(folder: Path, encoded: bytes) -> None:
    (folder / "a.toml").write_bytes(encoded)
    assert run("export", "--config", folder / "a.toml", "-o", folder / "a.onnx")[0] == 0
    stated = {"query": "float32[B,8,L,64]", "key": "float32[B,2,L,64]"}
    for source in (export_command.CONFIG, export_command.CALL):
        assert export_command.read(folder / "a.toml", source) == stated


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no such pipes")
def test_pipes(folder: Path) -> None:
    """Settings may come from one; a model, which is read more than once, may not."""

    def piped(data: bytes) -> str:
        reader, writer = os.pipe()
        os.write(writer, data)
        os.close(writer)
        return f"/dev/fd/{reader}"

    assert run("export", "--config", piped(TOML.encode()), "-o", folder / "a.onnx")[0] == 0
    assert export_command.read(Path(piped(TOML.encode())), export_command.CALL).keys() == {"query", "key"}
    assert "not a pipe" in refused("verify", piped(MODEL.SerializeToString()))
    os.mkfifo(folder / "nobody")
    assert "must be given" in refused("export", "--config", folder / "nobody")  # it is empty


AS_FROM_A_TERMINAL = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Where the tests run in the background, interrupts are ignored, and that is inherited."""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at what a process has loaded")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", [0.0, 0.3, 0.6, 0.9])
def test_an_interrupt_in_the_first_second(tmp_path: Path, after: float) -> None:
    command = [str(Path(sys.executable).with_name("sdpa-xp")), "verify", str(tmp_path / "none.onnx")]
    if not Path(command[0]).exists():
        command[:1] = [sys.executable, "-m", "sdpa_xp_export"]
    command = [sys.executable, "-c", AS_FROM_A_TERMINAL, *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while "numpy" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert err.startswith("sdpa-xp: ")
    assert err.count("\n") == 1
    if err == "sdpa-xp: interrupted\n":
        assert process.returncode == 130
    else:  # its work was done: Python hands signals back to the system while it ends, and a shell says 130 then
        assert process.returncode in (2, -signal.SIGINT)
        assert "`model` must be a file" in err
