"""The switches make each library compute as an older CPU does, and every part of the tests has its turn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from quality import cpus
from quality.cpus import CPUS, EMULATED, OF_ONNXRUNTIME, SELECTED, Job, environment, jobs, main, outcome

PARTS = ("part-jax", "part-torch", "part-peers")
WHAT_IT_HAS = """
import json, threadpoolctl, torch
from numpy._core import _multiarray_umath as numpy_core
blas = {one["architecture"] for one in threadpoolctl.threadpool_info() if one["internal_api"] == "openblas"}
features = [name for name in numpy_core.__cpu_dispatch__ if numpy_core.__cpu_features__[name]]
print(json.dumps([[*blas], features, torch.backends.cpu.get_cpu_capability()]))
"""


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("cpu", "capability"), [("haswell", "AVX2"), ("sandybridge", "DEFAULT")])
def test_libraries_compute_as_on_that_cpu(cpu: str, capability: str) -> None:
    command = [sys.executable, "-c", WHAT_IT_HAS]
    ran = subprocess.run(command, env=environment(cpu), check=True, capture_output=True, text=True)
    blas, features, torch = json.loads(ran.stdout)
    assert [architecture.lower() for architecture in blas] in ([cpu], [])
    assert not [name for name in features if name.startswith(("AVX512", "X86_V4"))]
    assert cpu == "haswell" or not {"X86_V3", "AVX2", "FMA3"} & {*features}
    assert torch in (capability, "DEFAULT")
    assert environment(cpu)["XLA_FLAGS"].endswith(CPUS[cpu]["XLA_FLAGS"])


@pytest.mark.parametrize("emulator", [None, "/usr/bin/qemu-x86_64"])
def test_each_part_has_its_turn(monkeypatch: pytest.MonkeyPatch, emulator: str | None) -> None:
    monkeypatch.setattr(cpus.shutil, "which", lambda _: emulator)
    all_parts = [job for n in range(1, 5) for job in jobs(PARTS, f"{n}/4")]
    tests = Counter((job.cpu, job.name) for job in all_parts if "false" not in job.name)
    wanted = [(cpu, part) for cpu in CPUS for part in PARTS]
    emulated = [("emulated", "tests of onnxruntime")] if emulator else []
    assert tests == Counter([*wanted, *emulated])
    alarms = {job.command[-1] for job in all_parts if job.cpu == "haswell" and "false" in job.name}
    assert alarms == {f"{n}/4" for n in range(1, 5)}
    assert {job.command[2] for job in all_parts if job.cpu == "emulated"} == ({EMULATED} if emulator else set())


def test_what_passed_is_kept_and_what_failed_runs_again(tmp_path: Path) -> None:
    count = tmp_path / "count"

    def job(code: int) -> Job:
        program = f"open({str(count)!r}, 'a').write('x'); print('3 passed in 1s'); raise SystemExit({code})"
        return Job("haswell", f"part-{code}", (sys.executable, "-c", program))

    for _ in range(2):
        assert outcome(job(0), tmp_path) == (True, "3 passed in 1s")
    assert count.read_text() == "x"
    for _ in range(2):
        assert outcome(job(1), tmp_path) == (False, "3 passed in 1s")
    assert count.read_text() == "xxx"


def test_the_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpus, "KEPT", tmp_path)
    monkeypatch.setattr(cpus.shutil, "which", lambda _: None)
    monkeypatch.setattr(cpus, "outcome", lambda job, _: (job.cpu == "haswell", "2 passed in 1s"))
    assert main(["--part", "1/1", "part-jax"]) == 1
    *_, tests, failing, alarms, failing_too, note = capsys.readouterr().out.splitlines()
    assert tests.split() == ["haswell", "part-jax", "ok", "2", "passed", "in", "1s"]
    assert failing.split()[:3] == ["sandybridge", "part-jax", "FAIL"]
    assert [line.split()[:4] for line in (alarms, failing_too)] == [
        ["haswell", "false", "alarms", "1/1"],
        ["sandybridge", "false", "alarms", "1/1"],
    ]
    assert "qemu-user" in note


def test_a_command_as_on_that_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os; print(os.environ['OPENBLAS_CORETYPE']); raise SystemExit(3)"
    assert main(["sandybridge", sys.executable, "-c", program]) == 3
    assert capfd.readouterr().out == "Sandybridge\n"


@pytest.mark.needs("openvino", "torch", "transformers")
def test_the_tests_of_onnxruntime_are_there() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *OF_ONNXRUNTIME, "-k", SELECTED]
    ran = subprocess.run(command, cwd=cpus.ROOT, env=environment(""), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    for name in OF_ONNXRUNTIME:
        assert name.partition("::")[0] in ran.stdout
