"""A model of anyone hangs, fills the memory or crashes in a process of its own, and `verify` says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_models as hostile
import numpy as np
import onnx
import pytest
from command import refused, run
from internals import ModelFailedError, peak_bytes, process

from sdpa_xp_export import TensorSpec, export_attention, save, to_onnx, verify, verify_layer


@pytest.fixture
def models_share_a_process() -> None:
    """Replaces the fixture of all other tests: here each model has a process of its own, as for a user."""


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which processes there are")


def within(doing: str, limit: str) -> str:
    return rf"^verify: onnxruntime must {doing} `model` within the limit of {limit}; got (timeout|memory)="


def count(number: float) -> np.ndarray:
    return np.asarray([number], np.int64)


LARGE: dict[str, Callable[[], onnx.ModelProto]] = {
    "Expand to 10 GB": lambda: hostile.large("Expand", ["sum", count(2.5e9)]),
    "ConstantOfShape": lambda: hostile.large("ConstantOfShape", [count(2**34)]),
    "Range": lambda: hostile.large("Range", [np.float32(0), np.float32(2**34), np.float32(1)]),
}


@pytest.mark.parametrize("what", LARGE)
def test_a_model_that_takes_more_memory_than_there_is(what: str) -> None:
    """By default, with no limit of the caller."""
    with pytest.raises(ModelFailedError, match=within("(load|run)", "memory")):
        verify(LARGE[what]())


def test_more_memory_for_what_is_honest() -> None:
    """A large model and very many scores take more, up to what the machine has; a file may state any number."""
    model = hostile.honest()
    assert process.default_memory(model, 10**6) == process.default_memory(model, 10**8) > 2**33
    hostile.with_constant(model, "weights", np.zeros(10**6, np.float32))
    assert process.default_memory(model, 1) - process.default_memory(hostile.honest(), 1) == 16 * 10**6
    if sys.platform == "linux":
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert process.default_memory(model, 10**15) <= max(machine, 2**34)


def test_a_limit_of_memory() -> None:
    model = hostile.large("Expand", ["sum", count(2e7)])  # 80 MB
    assert verify(model, memory=2**30).runs  # its numbers agree or not: it ran
    with pytest.raises(ModelFailedError, match=within("run", "memory") + "50000000. If you trust the model, "):
        verify(model, memory=5 * 10**7)
    with pytest.raises(ModelFailedError, match=within("(load|run)", "memory") + "1. "):
        verify(hostile.honest(), memory=1)


def test_an_output_that_is_too_large_for_this_process() -> None:
    """It would have to hold it beside the process that ran the model."""
    model = hostile.large_output((1, 1, 6_250_000, 8))
    assert verify(hostile.honest(), memory=2**29).agrees
    with pytest.raises(ModelFailedError, match=within("run", "memory")):
        verify(model, memory=2**29)


@pytest.mark.parametrize(
    ("model", "doing"),
    [
        (hostile.endless_loop(), "run"),
        (hostile.doubling_functions(), "load"),
        (hostile.doubling_functions(model=hostile.honest("float16", "attention")), "load"),
    ],
    ids=["loop", "functions", "half precision"],
)
def test_a_limit_of_time(model: onnx.ModelProto, doing: str) -> None:
    start = time.monotonic()
    with pytest.raises(ModelFailedError, match=within(doing, "time") + "0.5 s, of all runs together"):
        verify(model, timeout=0.5)
    assert time.monotonic() - start < 60  # not the default


def test_the_limit_of_time_is_for_all_runs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))  # each look takes a second
    with pytest.raises(ModelFailedError, match=within("run", "time") + "90 s"):
        verify(hostile.honest(), timeout=90)
    assert verify(hostile.honest(), timeout=10**5).agrees


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["heads", "windows"])
@pytest.mark.parametrize("thorough", [False, True])
def test_the_limit_of_time_is_also_for_the_reference(what: str, thorough: bool) -> None:
    """The file states the call, and so how long the inputs and the reference take: here far over 40 seconds."""
    model = hostile.many_heads(200_000) if what == "heads" else hostile.many_windows(1_000)
    start = time.monotonic()
    computed = r"^verify: the inputs and the reference of `model` must be computed within the limit of time; "
    trusted = r"got timeout=6 s, of all runs together\. If you trust the model, pass a larger `timeout`\.$"
    with pytest.raises(ModelFailedError, match=computed + trusted):
        verify(model, timeout=6, thorough=thorough)  # a busy machine takes seconds to load the model
    assert time.monotonic() - start < 30


def test_the_start_of_the_process_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it takes seconds, which is no fault of the model."""
    providers = process.RuntimeProcess.providers

    def late(*arguments: Any) -> list[str]:
        time.sleep(2.0)
        return providers(*arguments)

    monkeypatch.setattr(process.RuntimeProcess, "providers", late)
    qkv = TensorSpec("float32", (1, 1, 2, 4))
    assert verify(export_attention(qkv, qkv, qkv), timeout=1.9).agrees


def test_no_flag_has_what_the_file_states(tmp_path: Path) -> None:
    spec = "float32[B,4,L,8]"
    model = save(hostile.restated(hostile.honest(), query=spec), tmp_path / "other.onnx")
    assert f", call=query: {spec}" in refused("verify", model)
    call = tmp_path / "call.toml"
    call.write_text("".join(f"{name} = '{spec}'\n" for name in ("query", "key")))
    assert f", --call=query: {spec}" in refused("verify", model, "--call", call)


@pytest.mark.skipif(sys.platform == "win32", reason="the shell of Windows closes no streams")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("closed", [">&- 2>&- <&-", "2>&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    """The exit code and the page are as with open ones."""
    model, page = save(hostile.honest(), tmp_path / "right.onnx"), tmp_path / "page.html"
    command = f'"$0" -m sdpa_xp_export verify "$@" {closed}'
    for arguments, code in ((["--html", page], 0), (["--timeout", "1e-9"], 1)):
        shell = ["sh", "-c", command, sys.executable, str(model), *map(str, arguments)]
        assert subprocess.run(shell, capture_output=True, timeout=60).returncode == code
    assert "agrees" in page.read_text()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ended_by", ["SIGSEGV", "SIGFPE", "SIGKILL"])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")
def test_a_process_that_crashes(ended_by: str, processes: list[Any]) -> None:
    """As where a kernel divides by zero, or the system takes the memory back."""

    def crash(done: int, _total: int, _shown: str) -> None:
        if done == 2:
            os.kill(processes[-1].pid, signal.Signals[ended_by])

    with pytest.raises(ModelFailedError, match=rf"run `model` to the end; got its process=ended by {ended_by}"):
        verify(hostile.honest(), watch=crash)
    assert verify(hostile.honest()).agrees


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that `verify` starts."""
    started = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            started.append(self)

    monkeypatch.setattr(process.subprocess, "Popen", Noted)
    return started


def test_a_process_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.child, "__file__", str(tmp_path / "none.py"))
    with pytest.raises(RuntimeError, match=r"start another process, in which .*No such file or directory$"):
        verify(hostile.honest())


def test_a_call_starts_one_process_and_ends_it(processes: list[Any]) -> None:
    verify(hostile.honest())
    assert len(processes) == 1
    verify_layer(to_onnx(lambda x: x * 2, TensorSpec("float32", ("B", 4))), lambda x: x * 2)
    with pytest.raises(ModelFailedError):
        verify(hostile.endless_loop(), timeout=0.1)
    with pytest.raises(RuntimeError, match="mine"):
        verify(hostile.honest(), watch=raising)
    assert [started.returncode is None for started in processes] == [False] * 4
    with pytest.raises(ValueError, match="`model` must have the inputs"):  # before a process starts
        verify(hostile.honest(), call={name: TensorSpec("float32", (1, 1, 2, 2)) for name in QKV})
    assert len(processes) == 4


QKV = ("query", "key", "value")


def raising(*_: object) -> None:
    raise RuntimeError("mine")


def test_in_a_thread() -> None:
    reports = []
    thread = threading.Thread(target=lambda: reports.append(verify(hostile.honest())))
    thread.start()
    thread.join()
    assert reports[0].agrees


def test_texts_are_no_outputs() -> None:
    model = to_onnx(lambda x: x * 2, TensorSpec("float32", ("B", 4)))
    (name,) = (value.name for value in model.graph.output)
    model.graph.node.append(onnx.helper.make_node("Cast", [name], ["text"], to=onnx.TensorProto.STRING))
    model.graph.output[0].name = "text"
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.STRING
    with pytest.raises(ModelFailedError, match="run `model`; got its error=text must be an array of num"):
        verify_layer(model, lambda x: {"text": x * 2})


SCRIPT = """
import sys
sys.path[:0] = {paths}
import hostile_models, signal
from sdpa_xp_export import verify
signal.signal(signal.SIGINT, signal.default_int_handler)
print("agrees:", verify(hostile_models.honest()).agrees, flush=True)
print(len(__file__) > 0, flush=True)
verify(hostile_models.endless_loop())
"""
"""A script whose main part has no guard; it must not run twice."""


@LINUX
@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_what_ends_a_script_ends_the_process_of_the_model(tmp_path: Path, number: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=sys.path))
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert [running.stdout.readline() for _ in range(2)] == ["agrees: True\n", "True\n"]
        (child,) = until(lambda: children(running.pid))
        until(lambda: "onnxruntime" in Path(f"/proc/{child}/maps").read_text())
        time.sleep(0.2)  # so that it is within the run
        running.send_signal(number)
        out, err = running.communicate(timeout=120)
    assert out == ""
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    until(lambda: not is_running(child))


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait for a condition, and return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_limits_of_the_command(tmp_path: Path) -> None:
    loop = save(hostile.endless_loop(), tmp_path / "loop.onnx")
    code, out, err = run("verify", loop, "--timeout", "0.5")
    assert (code, out) == (1, "")
    within_time = "onnxruntime must run `model` within the limit of time; got --timeout=0.5"
    assert err.startswith(f"sdpa-xp: verify: {within_time}")
    assert "pass a larger `--timeout`" in err
    large = save(hostile.large("Expand", ["sum", count(2.5e8)]), tmp_path / "large.onnx")
    code, _, err = run("verify", large, "--memory", "200MB")
    assert code == 1
    assert "within the limit of memory; got --memory=200000000. " in err


@pytest.mark.parametrize(("platform", "expected"), [("darwin", 3), ("freebsd", 3 * 1024)])
def test_the_unit_of_the_peak_of_memory(platform: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS counts bytes, and other systems kilobytes."""
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=3))
    assert peak_bytes() == expected
