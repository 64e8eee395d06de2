"""Which tests run: what is asked for by name must run, and the contributor's loop needs NumPy alone."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from without import run_without

ROOT = Path(__file__).parents[2]
OTHERS = ("torch", "jax", "dask", "mlx", "array_api_strict", "onnx", "onnxruntime", "matplotlib")
OPTIONS = ("-q", "-p", "no:cacheprovider", "-n", "0")
REFUSALS = "tests/refusals/test_refusals.py"


Printed = pytest.CaptureFixture[str]


def run_here(capsys: Printed, *arguments: str) -> tuple[int, str]:
    """Run pytest in this process, which has imported all; return the exit code and what it printed."""
    code = pytest.main([*OPTIONS, *arguments])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def run_in_another(absent: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in an interpreter that finds none of some packages."""
    code = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    return run_without(absent, code, *OPTIONS, *arguments, cwd=ROOT)


@pytest.mark.parametrize("name", ["torch", "jax-x64", "strict-device1", "mlx", "cupy"])
def test_a_library_that_is_asked_for_must_be_there(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module == "numpy" or None)
    code, printed = run_here(capsys, REFUSALS, f"--backends=numpy,{name}")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert f"--backends: {name} needs " in printed
    assert "which is not installed" in printed


def test_a_name_that_is_no_library(capsys: Printed) -> None:
    code, printed = run_here(capsys, REFUSALS, "--backends=numpi")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--backends: numpi is none of numpy, " in printed


def test_the_rules_of_cupy_are_not_cupy(capsys: Printed) -> None:
    code, printed = run_here(capsys, REFUSALS, "--backends=cupy,cupy-rules")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--backends: cupy and its rules are one module" in printed


def collected(capsys: Printed, *arguments: str) -> str:
    """Return the names of the tests that would run."""
    code, printed = run_here(capsys, "--collect-only", *arguments)
    assert code == 0, printed
    return printed


def test_tests_of_a_library_are_part_of_its_run_alone(capsys: Printed) -> None:
    of_numpy, of_torch, of_all = (
        collected(capsys, REFUSALS, *chosen) for chosen in (["--backends=numpy"], ["--backends=torch"], [])
    )
    by_torch, by_none = "::test_each_library_says_the_same[torch-", "::test_recorded[attention]"
    assert by_torch not in of_numpy
    assert by_torch in of_torch
    assert by_none in of_numpy
    assert by_none not in of_torch
    assert by_torch in of_all
    assert by_none in of_all


def test_a_thin_run_has_a_case_of_each_test_that_is_sampled(capsys: Printed) -> None:
    """But none of a test whose subject is size."""
    files = ("tests/chunks/test_graphs.py", "tests/chunks/test_cluster.py")
    few, every = collected(capsys, *files, "--thin"), collected(capsys, *files)
    sampled = "::test_nothing_is_computed_by_the_call["
    assert 0 < few.count(sampled) <= every.count(sampled) / 2
    assert ("[1GiB]" in few, "[1GiB]" in every) == (False, True)
    assert few.count("[400MiB]") == every.count("[400MiB]") == 1


def test_a_file_of_other_libraries_is_not_imported(pytestconfig: pytest.Config) -> None:
    plugin: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    for chosen, is_ignored in (("numpy", True), ("numpy,jax", None), (None, None)):
        config = SimpleNamespace(getoption={"--backends": chosen}.get)
        path = ROOT / "tests/mesh/test_mesh_refusals.py"
        assert plugin.pytest_ignore_collect(path, config) is is_ignored


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("which", ["--fast", "--backends=numpy"])
def test_numpy_alone_is_enough(which: str) -> None:
    """Every file can be collected, and what needs another library is left out."""
    files = ("test_refusals.py", "test_cache_refusals.py", "test_mappings.py", "test_explain.py")
    done = run_in_another(OTHERS, "tests/core", which, "-k", " or ".join(files))
    assert done.returncode == 0, done.stdout


def test_without_a_choice_what_is_absent_is_skipped() -> None:
    done = run_in_another(OTHERS, REFUSALS)
    assert done.returncode == 0, done.stdout
    assert "torch is not installed" in done.stdout
    assert "array_api_strict is not installed" in done.stdout
