"""Which tests run: what is asked for by name must run, and the contributor's loop needs NumPy alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHERS = ("torch", "jax", "dask", "mlx", "array_api_strict", "onnx", "onnxruntime", "matplotlib")


PROGRAM = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def run(absent: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in an interpreter that finds none of some packages."""
    options = ["-q", "-p", "no:cacheprovider", "-n", "0"]
    command = [sys.executable, "-c", PROGRAM.format(absent=absent), *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


REFUSALS = "tests/core/test_refusals.py"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["torch", "jax-x64", "strict-device1", "mlx"])
def test_a_library_that_is_asked_for_must_be_there(name: str) -> None:
    done = run(OTHERS, REFUSALS, f"--backends=numpy,{name}")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--backends: {name} needs " in done.stderr
    assert "which is not installed" in done.stderr


def test_a_name_that_is_no_library() -> None:
    done = run((), REFUSALS, "--backends=numpi")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--backends: numpi is none of numpy, " in done.stderr


def test_the_rules_of_cupy_are_not_cupy() -> None:
    """CuPy itself runs if it is asked for, and its rules only by their own name."""
    done = run(("cupy",), REFUSALS, "--backends=cupy")
    assert "--backends: cupy needs cupy, which is not installed" in done.stderr
    done = run((), REFUSALS, "--backends=cupy,cupy-rules")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--backends: cupy and its rules are one module" in done.stderr


@pytest.mark.slow
def test_tests_of_a_library_are_part_of_its_run_alone() -> None:
    def collected(*arguments: str) -> str:
        done = run((), REFUSALS, "--collect-only", *arguments)
        assert done.returncode == 0, done.stdout
        return done.stdout

    of_numpy, of_torch = collected("--backends=numpy"), collected("--backends=torch")
    assert "::test_mixed_libraries" not in of_numpy
    assert "::test_mixed_libraries" in of_torch
    assert "::test_no_plain_array" in of_numpy
    assert "::test_no_plain_array" not in of_torch
    of_all = collected()
    assert "::test_mixed_libraries" in of_all
    assert "::test_no_plain_array" in of_all


def test_a_thin_run_has_a_case_of_each_test_that_is_sampled() -> None:
    """But none of a test whose subject is size."""

    def collected(*arguments: str) -> str:
        done = run(
            (), "tests/chunks/test_graphs.py", "tests/chunks/test_cluster.py", "--collect-only", *arguments
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    sampled = "::test_nothing_is_computed_by_the_call["
    few, every = collected("--thin"), collected()
    assert 0 < few.count(sampled) <= every.count(sampled) / 2
    assert ("[1GiB]" in few, "[1GiB]" in every) == (False, True)
    assert few.count("[400MiB]") == every.count("[400MiB]") == 1


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("which", ["--fast", "--backends=numpy"])
def test_numpy_alone_is_enough(which: str) -> None:
    """Every file can be collected, and what needs another library is left out."""
    files = ("test_refusals.py", "test_cache_refusals.py", "test_mask_refusals.py", "test_explain.py")
    done = run(OTHERS, "tests/core", which, "-k", " or ".join(files))
    assert done.returncode == 0, done.stdout


def test_without_a_choice_what_is_absent_is_skipped() -> None:
    done = run(OTHERS, REFUSALS)
    assert done.returncode == 0, done.stdout
    assert "torch is not installed" in done.stdout
    assert "array_api_strict is not installed" in done.stdout
