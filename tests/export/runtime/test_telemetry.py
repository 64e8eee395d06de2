"""onnxruntime sends telemetry by default: `verify`, the command, the tests, make and the workflows do not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from internals import program

from sdpa_xp_export import TensorSpec, export_attention, save

ROOT = Path(__file__).parents[3]
SWITCH = "ORT_DISABLE_TELEMETRY"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it counts the files and sockets of Linux")

STRACE = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=socket", "-o"]
ITSELF = "import onnxruntime"
VERIFY = """
import sys
from sdpa_xp_export import verify
assert verify({path!r}).agrees
print("onnxruntime" in sys.modules)
"""
COMMAND = """
import sys
sys.argv[1:] = {arguments!r}
if "backends" in sys.argv:  # others would take long to import
    from internals import backends
    backends.LIBRARIES = ("numpy",)
from sdpa_xp_export.cli import main
main()
"""


def traces(tmp_path: Path, code: str, **settings: str) -> tuple[list[str], list[str], str]:
    """The files that a program writes into the home folder of its user, its sockets, and what it prints."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    home_of = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    environment |= home_of | {"PYTHONDONTWRITEBYTECODE": "1"} | settings
    command = [sys.executable, "-c", code]
    if watched := can_trace():
        log = str(tmp_path / "sockets")
        command = [*STRACE, log, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "sockets").read_text().splitlines() if watched else []
    sockets = [call for call in calls if "socket(" in call]
    return [str(file) for file in home.rglob("*") if file.is_file()], sockets, done.stdout


def can_trace() -> bool:
    """Return whether system calls can be watched: strace is installed, and allowed."""
    traced = ["strace", "-qq", "-o", os.devnull, "true"]
    return bool(shutil.which("strace")) and not subprocess.run(traced).returncode


def test_onnxruntime_writes_files_unless_it_is_told_not_to(tmp_path: Path) -> None:
    """If this release sends none, the other tests here show nothing."""
    files, _, _ = traces(tmp_path, ITSELF)
    if not files:
        pytest.skip("this onnxruntime has no telemetry")
    (tmp_path / "told").mkdir()
    assert traces(tmp_path / "told", ITSELF, **{SWITCH: "1"})[:2] == ([], [])


@pytest.mark.slow
def test_verify_sends_nothing(tmp_path: Path) -> None:
    """It does not import onnxruntime in the process of a user, who may want it to send something."""
    qkv = TensorSpec("float32", ("B", 2, "L", 8))
    path = save(export_attention(qkv, qkv, qkv), tmp_path / "a.onnx")
    assert traces(tmp_path, VERIFY.format(path=str(path))) == ([], [], "False\n")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["backends"], ["verify", "PATH"]])
def test_the_command_sends_nothing(tmp_path: Path, arguments: list[str]) -> None:
    qkv = TensorSpec("float32", ("B", 2, "L", 8))
    path = save(export_attention(qkv, qkv, qkv), tmp_path / "a.onnx")
    arguments = [argument.replace("PATH", str(path)) for argument in arguments]
    assert traces(tmp_path, program(COMMAND.format(arguments=arguments)))[:2] == ([], [])


def test_the_tests_make_and_the_workflows_send_nothing() -> None:
    assert os.environ[SWITCH] == "1"
    texts = {path: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert texts
    for path, text in texts.items():
        assert f'\nenv:\n  {SWITCH}: "1"\n' in text, path
    assert f"\nexport {SWITCH} := 1\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/how-to/deploy.md"])
def test_the_first_line_about_onnxruntime_says_so(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    first = next(line for line in lines if "onnxruntime" in line)
    assert SWITCH in first
