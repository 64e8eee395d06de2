"""The command line, as a user runs it: help, tables, the demo, and one line for whatever goes wrong."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import printed, refused, run
from internals import COLUMNS, backends, demo, heat, say_table
from short_runs import try_short_lengths_alone

import sdpa_xp
from sdpa_xp_export import TensorSpec, verify


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),  # while it loads
        (ValueError("one\ntwo \x1b[31m"), 2, "one two \\x1b[31m"),
        (OSError(28, "No space left on device"), 2, "[Errno 28] No space left on device"),
    ],
)
def test_whatever_goes_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def failing(_: list[str]) -> int:
        raise error

    monkeypatch.setattr("sdpa_xp_export.cli.app.run", failing)
    assert run("backends") == (code, "", f"sdpa-xp: {line}\n")


def test_help() -> None:
    """Also where nothing is asked for."""
    out = printed()
    assert out == run("--help")[1]
    for name in ("export", "verify", "judge", "demo", "backends"):
        assert f"\n  {name} " in out
        of_command = run(name, "-h")[1]
        assert of_command == run(name, "--help")[1]
        assert "[str]" not in of_command  # as `list[str]`, a type of Python
    assert "numpy, torch, " in run("judge", "--help")[1]
    assert "dtype[length,...]" in run("export", "--help")[1]


def test_help_says_all_of_what_each_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns, where longer lines end in dots."""
    monkeypatch.setenv("COLUMNS", "80")
    about, _, commands = run("--help")[1].partition("\nCommands:\n")
    assert "exit code" not in about  # the commands and the examples come first
    assert " sdpa-xp demo\n" in commands.partition("Exit codes:")[0]
    assert "\n    0    success\n" in commands  # a line for each
    assert "\n    130  interrupted\n" in commands
    assert max(map(len, commands.splitlines())) <= 80
    lines = commands.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == ["export", "verify", "judge", "demo", "backends"]
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


@pytest.mark.usefixtures("short_verify")
def test_help_has_an_example_of_each_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they stand, and replace no file; the others take long, and have their own tests."""
    monkeypatch.chdir(tmp_path)
    try_short_lengths_alone(monkeypatch)
    lines = [shlex.split(line) for line in run()[1].splitlines() if line.startswith("    sdpa-xp ")]
    assert sorted(line[1] for line in lines) == ["backends", "demo", "export", "judge", "verify"]
    for _, command, *arguments in lines:
        if command not in ("demo", "judge"):
            assert run(command, *arguments)[0] == 0
            if command == "export":  # a reader may run it twice
                assert "Pass `--force` to replace it." in refused(command, *arguments)


def test_names_in_a_list_may_break_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = run("export", "--help")[1].split()
    assert {"output,", "lse,", "row_max,", "key_sums,"} <= {*words}


def test_backends() -> None:
    code, out, _ = run("backends", "--json")
    names = {(row["name"], row["device"]) for row in json.loads(out)}
    assert code == 0
    assert {("numpy", "cpu"), ("torch", "cpu"), ("onnxruntime", "CPUExecutionProvider")} <= names
    assert np.__version__ in run("backends")[1]


@pytest.mark.parametrize(
    ("error", "bound", "shown"),
    [
        (1.0, 4.0, ("25%", "green")),
        (1.2, 4.0, ("30%", "yellow")),
        (3.0, 4.0, ("75%", "dark_orange")),
        (4.0, 4.0, ("100%", "dark_orange")),
        (5.0, 4.0, ("125%", "bold red")),
        (0.0, 0.0, ("0%", "green")),
        (1.0, 0.0, ("inf", "bold red")),
        (float("nan"), 1.0, ("inf", "bold red")),
    ],
)
def test_the_share_of_the_bound_has_a_colour(error: float, bound: float, shown: tuple[str, str]) -> None:
    cell = heat(error, bound)
    assert (cell.plain, cell.style) == shown


@pytest.mark.usefixtures("short_verify")
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = backends.find_backends(["numpy", "torch", "array-api-strict"])
    monkeypatch.setattr(backends, "find_backends", lambda: few)
    monkeypatch.setattr(backends, "is_installed", lambda name: name in {library.name for library in few})
    out = printed("demo", "-o", tmp_path / "out")
    how = "  In the source folder of sdpa_xp, run: pip install '.[jax,dask,mlx]'"
    assert f"not compared, because not installed: jax, cupy, dask, mlx\n{how}\n" in out
    assert "[CLS] she put the cup on the table and it broke . [SEP]\n" in out
    assert 'layer 3, head 1 (from 0): "it" attends most to "animal", weight 0.69' in out
    assert 'layer 3, head 1 (from 0): "it" attends most to "cup", weight 0.59' in out
    for name in ("numpy", "torch", "array-api-strict", "onnxruntime"):
        assert name in out
    assert (tmp_path / "out" / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert verify(tmp_path / "out" / "attention.onnx").agrees


def test_demo_exits_1_when_a_backend_disagrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = sdpa_xp.scaled_dot_product_attention
    few = backends.find_backends(["numpy"])
    monkeypatch.setattr(backends, "find_backends", lambda: few)
    monkeypatch.setattr(
        sdpa_xp, "scaled_dot_product_attention", lambda *a, **k: right(*a, **k | {"attn_mask": None})
    )
    code, out, _ = run("demo", "-o", tmp_path)
    assert code == 1
    assert "DISAGREES: numpy xp float32 cpu: layer 1, layer 2" in out


def test_demo_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "attention.onnx").write_text("mine")
    refused("demo", "-o", tmp_path)
    assert (tmp_path / "attention.onnx").read_text() == "mine"


def test_encoder_attends_to_no_padding() -> None:
    encoded = demo.activations()
    assert encoded.mask.shape == (2, 1, 1, 16)
    assert [layer.query.shape for layer in encoded.layers] == [(2, 12, 16, 32)] * 6
    assert TensorSpec("float32", encoded.layers[0].query.shape).shape == (2, 12, 16, 32)
    longer = demo.activations(multiple=24)
    for short, long in zip(encoded.layers, longer.layers, strict=True):
        np.testing.assert_allclose(short.query[:, :, :13], long.query[:, :, :13], rtol=0, atol=1e-5)


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_the_extras(module: str) -> None:
    """It names the extra, and does not show a traceback."""
    script = f"import sys; sys.modules[{module!r}] = None; from sdpa_xp_export.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "run: pip install '.[cli,export]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sdpa_xp_export", "backends", "--fast"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sdpa-xp: No such option: --fast. See sdpa-xp backends --help.\n"


@pytest.mark.parametrize("command", ["export", "verify", "judge", "demo", "backends"])
def test_the_help_says_what_each_flag_takes(command: str) -> None:
    """Its value, not its type in Python; and in `verify`, nothing of onnxruntime that is so in any engine."""
    text = " ".join(run(command, "--help")[1].split())
    assert not {"<str>", "<float>", "<int>"} & {*text.split()}
    if command == "verify":
        assert "--engine <engine>" in text
        assert text.count("onnxruntime") == 2  # an engine, and the default


def test_a_table_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, with the longest names of libraries and forms. No number is broken."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    row = ("array-api-strict", "grouped_query", "bfloat16", "CPU_DEVICE", "1.1e-07", "100%", "yes")
    say_table(COLUMNS, [row])
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(cell in line.split() for line in lines) for cell in row)
