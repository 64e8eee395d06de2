"""The run of all that needs a GPU: a step that hangs, fails or lacks a package costs no other its results."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import without
from without import run_without

from quality.gpu import child, needs, run, steps
from quality.gpu.steps import Step, limit

ROOT = Path(__file__).parents[2]
FINE = Step(("-c", ""), 1)
HANGS = Step(("-c", "import time; print('begun', flush=True); time.sleep(600)"), 1)
FAILS_AND_HANGS = """
import time

def test_fails():
    assert 1 + 1 == 3

def test_passes():
    pass

def test_hangs():
    time.sleep(600)
"""


def pytest_step(folder: Path, code: str, *options: str) -> Step:
    file = folder / "test_of_a_step.py"
    file.write_text(code)
    return Step(("-m", "pytest", "-p", "no:cacheprovider", *options, str(file)), 1)


def results(
    folder: Path, chosen: dict[str, Step], seconds: float = 600, device: str = "cpu"
) -> tuple[int, dict[str, Any]]:
    """Run the steps; return the exit code, and what is written of each."""
    code = run.run(chosen, folder / "results.json", folder, seconds, device)
    return code, json.loads((folder / "results.json").read_text())["steps"]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ENDING", 1.0)
    monkeypatch.setattr(child, "EVERY", 0.1)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_what_hangs_is_ended_and_all_steps_get_their_part_of_the_time(tmp_path: Path) -> None:
    start = time.monotonic()
    code, reports = results(tmp_path, {"one": HANGS, "fine": FINE, "two": HANGS, "three": HANGS}, seconds=7)
    assert time.monotonic() - start < 7
    assert code == 1
    assert reports["fine"]["outcome"] == "passed"
    for name in ("one", "two", "three"):
        assert reports[name]["reason"].startswith("ended after")
        assert reports[name]["printed"] == "begun"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_limits_together_are_less_than_the_time_of_the_run(device: str) -> None:
    """Whatever the steps use of theirs."""
    shares = [step.share for step in steps.all_steps(device, Path()).values()]
    rng = random.Random(0)
    for uses in (lambda: 1.0, lambda: 0.0, rng.random):
        left = run.SECONDS - run.ANSWER - child.ENDING
        for number, share in enumerate(shares):
            limit_of_step = limit(left, share, sum(shares[number:]))
            assert 0 < limit_of_step <= left + 1e-9
            left -= uses() * limit_of_step
        assert left > -1e-9
    assert run.SECONDS <= 570


def test_numbers_come_before_long_tests() -> None:
    names = [*steps.all_steps("cuda", Path())]
    assert names.index("first calls") < names.index(steps.TABLE)
    assert max(map(names.index, ("table", "features"))) < min(
        map(names.index, ("core tests on cupy", "core tests on torch-cuda"))
    )


def test_without_time_no_step_begins(tmp_path: Path) -> None:
    code, reports = results(tmp_path, {"late": HANGS}, seconds=0)
    assert code == 1
    assert reports["late"] == {"outcome": "failed", "reason": "no time was left"}


def test_what_is_ended_leaves_what_it_said(tmp_path: Path) -> None:
    code, reports = results(tmp_path, {"tests": pytest_step(tmp_path, FAILS_AND_HANGS)}, seconds=9)
    report = reports["tests"]
    assert (code, report["outcome"], report["passed"]) == (1, "failed", 1)
    (failure,) = report["failed"]
    assert failure["test"].endswith("::test_fails")
    assert "assert (1 + 1) == 3" in failure["message"]
    assert [name.rpartition("::")[2] for name in report["running"]] == ["test_hangs"]
    page = (tmp_path / "results.md").read_text()
    assert "- `assert (1 + 1) == 3`: `" in page
    assert "- had not ended: `" in page


WORKERS = """
import os, pytest

def test_dies():
    os._exit(3)

@pytest.mark.skip(reason="no device")
def test_skipped(): pass

def test_passes(): pass

@pytest.fixture
def breaks():
    yield
    raise RuntimeError("at its end")

def test_fails_at_its_end(breaks): pass
"""


@pytest.mark.slow
def test_what_workers_say(tmp_path: Path) -> None:
    _, reports = results(tmp_path, {"tests": pytest_step(tmp_path, WORKERS, "-p", "xdist", "-n", "2")})
    report = reports["tests"]
    failed = {failure["test"].rpartition("::")[2]: failure["message"] for failure in report["failed"]}
    assert failed.keys() == {"test_dies", "test_fails_at_its_end"}
    assert "crashed" in failed["test_dies"]
    assert "at its end" in failed["test_fails_at_its_end"]
    assert report["skipped"] == {"no device": 1}
    assert (report["passed"], report["running"]) == (1, [])


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        ("import pytest\npytest.skip('no GPU', allow_module_level=True)", "skipped", "no GPU"),
        ("import no_such_module", "failed", "exit code 2"),
        ("import pytest\n@pytest.mark.skip(reason='no GPU')\ndef test(): pass", "skipped", "no GPU"),
        (
            "def test():\n    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)",
            "failed",
            "ended by SIGSEGV",
        ),
    ],
)
def test_a_step_of_which_nothing_ran_did_not_pass(tmp_path: Path, code: str, outcome: str, reason: str) -> None:
    exit_code, reports = results(tmp_path, {"tests": pytest_step(tmp_path, code)})
    assert exit_code == 1
    assert (reports["tests"]["outcome"], reports["tests"]["reason"]) == (outcome, reason)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_results_and_no_process(tmp_path: Path, ending: signal.Signals) -> None:
    program = f"""
import signal, sys
from quality.gpu import child, run, steps
signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored, where the tests run in the background
child.EVERY = 0.1
steps = {{"fine": {FINE}, "tests": {pytest_step(tmp_path, FAILS_AND_HANGS)}, "later": {FINE}}}
run.all_steps = lambda device, folder: steps
sys.argv = ["run.py", {str(tmp_path / "new" / "results.json")!r}, "--device", "cpu"]
sys.exit(run.main())
""".replace("Step(", "steps.Step(")
    target = tmp_path / "new" / "results.json"
    with subprocess.Popen([sys.executable, "-c", program], env=os.environ | child.SETTINGS) as process:
        end = time.monotonic() + 60
        while not (target.exists() and "test_hangs" in target.read_text()) and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(ending)
        assert process.wait(120) == 130
    reports = json.loads(target.read_text())["steps"]
    assert [report["outcome"] for report in reports.values()] == ["passed", "failed", "not begun"]
    assert reports["tests"]["reason"] == "interrupted"
    assert len(reports["tests"]["failed"]) == 1
    running = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False).stdout
    assert running == b""


LACKING = """
import json, pathlib
from quality.gpu import run, steps

said = {}
known = steps.all_steps("cpu", pathlib.Path("folder"))
for name in ["", *{module for step in known.values() for module in step.needs}]:
    blocked = {name}
    said[name] = run.lacking(known, "cpu", pathlib.Path("folder"), 0)
print(json.dumps(said))
"""
KNOWN = steps.all_steps("cpu", Path("folder"))
MODULES = {*(module for step in KNOWN.values() for module in step.needs), "jax", "mlx", "dask", "matplotlib"}


def test_a_step_is_skipped_with_the_name_of_the_package_that_it_lacks() -> None:
    done = run_without((), LACKING, env=os.environ | child.SETTINGS)
    said = json.loads(done.stdout)
    assert said.pop("") == {}
    for blocked, reasons in said.items():
        needing = {name for name, step in KNOWN.items() if blocked in step.needs}
        assert reasons == dict.fromkeys(needing, f"{blocked} not installed")


def test_the_libraries_of_the_core_tests_need_nothing_of_the_exporter() -> None:
    """CuPy and torch on CUDA come to the tests as these two do."""
    exporter = {"onnx", "onnxruntime", "typer", "rich"}
    assert all(not exporter & {*step.needs} for name, step in KNOWN.items() if name.startswith("core tests"))
    program = (
        "import libraries; print(libraries._exported('torch').device, libraries._exported('numpy').device)"
    )
    done = run_without(exporter, program, env=os.environ | child.SETTINGS)
    assert done.stdout == "cpu cpu\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table", "features", "exported graphs", "agreement in float32"])
def test_a_step_needs_no_package_that_it_does_not_name(tmp_path: Path, name: str) -> None:
    """Only its start: with the files of its tests, or its help. tests/packaging asks this of the core tests."""
    step = KNOWN[name]
    (tmp_path / "sitecustomize.py").write_text(without.PROGRAM.format(blocked=MODULES - {*step.needs}))
    paths = os.pathsep.join([child.SETTINGS["PYTHONPATH"], str(tmp_path)])
    start = ["--collect-only"] if "pytest" in step.command else ["--help"]
    command = " ".join([sys.executable, *step.command, *start]).replace("{seconds}", "1")
    command = re.sub(r" -n \d+", "", command)
    done = subprocess.run(
        command.split(),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('')", None),
        ("print('finds no GPU')", "torch finds no GPU"),
        ("raise OSError('libcuda is too old')", "torch fails: OSError: libcuda is too old"),
        ("import time; time.sleep(600)", "torch did not find a GPU in 2 s"),
        ("import os; os._exit(4)", "torch fails: exit code 4"),
    ],
)
def test_why_a_library_has_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str | None
) -> None:
    monkeypatch.setitem(needs.QUESTIONS, "torch", code)
    said = needs.without_device(["torch", "no_such_library"], tmp_path, 2 if "sleep" in code else 60)
    assert said.pop("no_such_library") == "no_such_library is not installed"
    assert said.get("torch") == reason


def test_a_step_runs_if_one_of_its_libraries_has_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "QUESTIONS", {"numpy": "print('')", "torch": "print('finds no GPU')"})
    chosen = {"both": FINE._replace(devices=("torch", "numpy")), "torch": FINE._replace(devices=("torch",))}
    code, reports = results(tmp_path, chosen, device="cuda")
    assert code == 0
    assert reports["both"]["outcome"] == "passed"
    assert reports["torch"] == {"outcome": "skipped", "reason": "torch finds no GPU"}


def test_an_older_version_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "version", {"torch": "2.11.0+cu130", "numpy": "99.0"}.__getitem__)
    assert needs.described("torch").startswith("torch 2.11.0+cu130 (pyproject.toml asks for ")
    assert needs.described("numpy") == "numpy 99.0"
    assert needs.described("no_such_module") == "not installed"


def test_files_that_are_there_are_replaced(tmp_path: Path) -> None:
    for name in ("results.json", "results.md"):
        (tmp_path / name).write_text("of another run")
    assert results(tmp_path, {"fine": FINE})[0] == 0
    assert "of another run" not in (tmp_path / "results.md").read_text()
    assert {path.suffix for path in tmp_path.glob("results*")} == {".json", ".md"}


def test_a_run_of_nothing_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text('{"steps": {}}')
    assert results(tmp_path, {"missing": FINE._replace(needs=("no_such_module",))}) == (1, {})
    assert not (tmp_path / "results.md").exists()
    assert capsys.readouterr().out == "missing: skipped: no_such_module not installed\n"


@pytest.mark.parametrize("target", ["", "results.txt", "folder.json", "file.json/results.json"])
def test_a_target_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file.json").write_text("")
    monkeypatch.setattr(sys, "argv", ["run.py", *([str(tmp_path / target)] if target else [])])
    monkeypatch.setattr(run, "run", None)
    with pytest.raises(SystemExit) as exited:
        run.main()
    assert exited.value.code == 2
    assert re.search("name a file of results that ends in .json|cannot write ", capsys.readouterr().err)


def test_a_trial_does_not_look_like_a_gpu(tmp_path: Path) -> None:
    results(tmp_path, {"fine": FINE})
    assert (tmp_path / "results.md").read_text().startswith("# A trial without a GPU\n")


def test_what_is_measured_is_kept(tmp_path: Path) -> None:
    """The rows of each dtype, and the table as far as it came."""
    table = "from pathlib import Path; [Path(name).write_text(text) for name, text in {}.items()]; 1 / 0"
    files = {str(tmp_path / "on_device.json"): "[2]", str(tmp_path / "on_device.md"): "# Table\n\n## Causal\n"}
    chosen = {"table": Step(("-c", table.format(files)), 1)}
    chosen |= {f"agreement in {name}": Step(("-c", f"print('[\"{name}\"')"), 1) for name in ("a", "b")}
    chosen["agreement in a"] = Step(("-c", "print('[1]')"), 1)
    assert results(tmp_path, chosen)[0] == 1
    written = json.loads((tmp_path / "results.json").read_text())
    assert (written["table"], written["agreement"]) == ([2], [1])
    assert "\n### Causal\n" in (tmp_path / "results.md").read_text()
