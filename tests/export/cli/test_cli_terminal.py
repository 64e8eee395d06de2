"""The command on a terminal: progress, interrupts, completion."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import QKV, printed, run
from edits import changed_output
from internals import program, say_table

from sdpa_xp_export import TensorSpec, export_attention, save
from sdpa_xp_export.cli import main
from sdpa_xp_export.forms.choice import FORMS

# As from a terminal: where the tests run in the background, interrupts are ignored, and that is inherited.
# And with few rows in the demo.
COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from internals import backends, demo; demo.DTYPES = ('float32',);"
    "few = backends.find_backends(['numpy']); backends.find_backends = lambda: few;"
    "from sdpa_xp_export.cli import main; main()"
)


@contextmanager
def on_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command, whose standard error is a terminal, and the other end of that."""
    reader, writer = os.openpty()
    command = [sys.executable, "-c", program(COMMAND), *arguments]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, env=environment) as process:
        os.close(writer)
        try:
            yield process, reader
        finally:
            process.kill()
            os.close(reader)


def everything(reader: int) -> str:
    """What comes from a terminal until its other end is closed."""
    text = b""
    while True:
        try:
            more = os.read(reader, 4096)
        except OSError:  # how Linux says so
            more = b""
        if not more:
            return text.decode()
        text += more


def test_progress_on_a_terminal(tmp_path: Path) -> None:
    """On standard error, row by row; standard output has the table alone."""
    with on_terminal("demo", "-o", str(tmp_path)) as (process, reader):
        shown = everything(reader)
        out, _ = process.communicate()
    assert process.returncode == 0
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in re.split("[\r\n]+", shown)]
    assert max(map(len, lines)) < 80
    steps = [re.sub(" [0-9:]{7}", "", line) for line in lines]
    rows = ["numpy xp", *(f"onnxruntime {form}" for form in FORMS)]
    # A row is named when it begins, before it is counted.
    for begins in ("0/6 reference float32", *(f"{n}/6 {row} float32 cpu" for n, row in enumerate(rows))):
        assert any(step.endswith(begins) for step in steps), begins
    assert b"\x1b" not in out
    assert b"primitive" in out


def test_progress_of_verify(tmp_path: Path) -> None:
    """Run by run; the name of the file cannot steer the terminal."""
    path = tmp_path / "\x1b[31m\x07[bold]a.onnx"
    run("export", "--query", "float32[B,2,5,4]", "--key", "float32[B,1,9,4]", "-o", path)
    with on_terminal("verify", str(path)) as (process, reader):
        shown = everything(reader)
        process.communicate()
    assert process.returncode == 0
    assert shown.index("B=2 on CPU") < shown.index("B=1, large scores on CPU")
    assert "verify \\x1b[31m\\x07[bold]a.onnx" in shown
    assert "\x1b[31m" not in shown
    assert "\x07" not in shown


@pytest.mark.usefixtures("short_verify")
def test_no_progress_beside_json(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    run("export", "--query", "float32[1,2,5,4]", "--key", "float32[1,1,9,4]", "-o", path)
    with on_terminal("verify", str(path), "--json") as (process, reader):
        assert everything(reader) == ""
        json.loads(process.communicate()[0])
    assert process.returncode == 0
    _, _, err = run("verify", path)
    assert err == ""  # no terminal


def test_interrupt() -> None:
    """One line, and the code that shells use."""
    with on_terminal("judge", "sdpa_xp:scaled_dot_product_attention") as (process, reader):
        while b"0/" not in os.read(reader, 4096):  # it has begun
            pass
        process.send_signal(signal.SIGINT)
        shown = everything(reader)
        out, _ = process.communicate()
    assert process.returncode == 130
    assert "sdpa-xp: interrupted" in shown
    assert "Traceback" not in shown
    assert out == b""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["backends"], 0),
        (["backends", "--json"], 0),
        (["export", *QKV, "-o", "new.onnx"], 0),
        (["verify", "right.onnx"], 0),
        (["verify", "right.onnx", "--json"], 0),
        (["verify", "wrong.onnx", "--runs"], 1),
        (["verify", "none.onnx"], 2),
        (["verfy"], 2),
    ],
)
@pytest.mark.usefixtures("short_verify")
def test_a_reader_who_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], code: int
) -> None:
    """The command goes on in silence, and its exit code is that of its result: `sdpa-xp ... | head -1`."""
    monkeypatch.chdir(tmp_path)
    qkv = TensorSpec("float32", (1, 2, "L", 8))
    if arguments[1:] == ["right.onnx"] or "wrong.onnx" in arguments or "--json" in arguments:
        model = export_attention(qkv, qkv, qkv, form="primitive")
        save(model, tmp_path / "right.onnx")
        changed_output("Mul", 1.01)(model)
        save(model, tmp_path / "wrong.onnx")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out, open(os.dup(writer), "w") as err:
        monkeypatch.setattr(sys, "argv", ["sdpa-xp", *arguments])
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.flush()  # as Python does at its end
        sys.stderr.flush()
    assert int(ended.value.code or 0) == code
    assert (tmp_path / "new.onnx").exists() == ("new.onnx" in arguments)


def test_a_reader_who_leaves_a_process() -> None:
    """And one who stays gets every line."""
    command = [sys.executable, "-u", "-m", "sdpa_xp_export", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert b"\n  verify " in subprocess.run(command, capture_output=True, check=True).stdout


COMPLETIONS = {
    "export --form ": {"auto", *FORMS},
    "export --form prim": {"primitive"},
    "export --layout ": {"...HLE", "...LHE"},
    "export --dtype b": {"bfloat16"},
    "export --softmax-dtype ": {"float32", "float64"},
    "export --runtime ": {
        *(f"onnxruntime>=1.28;{provider}" for provider in ("cpu", "cuda", "wasm", "webgpu", "web")),
        "openvino>=2026.4;cpu",
        "onnx",
    },
    "export --outputs ": {"output", "lse", "weights", "scores", "row_max", "entropy", "key_sums"},
    "verify a.onnx --provider ": {"cpu", "cuda", "wasm", "webgpu"},
    "verify a.onnx --require-provider cu": {"cuda"},
    "judge a.onnx --dtype ": {"float32", "float16", "bfloat16", "float64"},
    "judge a.onnx --library t": {"torch"},
    "ver": {"verify"},
}


@pytest.mark.parametrize(("line", "offered"), COMPLETIONS.items(), ids=COMPLETIONS)
def test_shell_completion(monkeypatch: pytest.MonkeyPatch, line: str, offered: set[str]) -> None:
    """As the script for bash asks for it."""
    monkeypatch.setenv("_SDPA_XP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"sdpa-xp {line}")
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ") + 1))
    out = printed()
    assert set(out.split()) == offered


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in run("--help")[1]


def test_a_number_is_not_broken_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two halves of one would read as two numbers; words are broken instead."""
    for name, text in {"COLUMNS": "24", "TERM": "xterm", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, text)
    say_table(["form", "error"], [["grouped_query, tiled", "1.2345678e-07"]])
    printed = capsys.readouterr().out
    assert "1.2345678e-07" in printed
    assert "grouped_query, tiled" not in printed
