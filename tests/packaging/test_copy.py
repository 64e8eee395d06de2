"""A copy of the library's folder is the library, under any name, where nothing is called `sdpa_xp`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "copied_attention"
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
"""What makes packages be missing in a process."""
FEW = ("masks/test_masks", "caches/test_cache", "test_semantics", "test_states", "test_explain")
"""The tests of core that run on a copy with --thin."""
THREADS = """
import warnings
import numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from copied_attention import explain, scaled_dot_product_attention
    from copied_attention._run.threads import thread_count
    x = np.random.default_rng(0).standard_normal((1, 4, 600, 32), np.float32)
    output = scaled_dot_product_attention(x, x, x, is_causal=True)
    again = scaled_dot_product_attention(x, x, x, is_causal=True)
scores = np.where(np.tri(600, dtype=bool), x @ np.swapaxes(x, -1, -2) / np.sqrt(32), -np.inf)
weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
expected = weights / weights.sum(axis=-1, keepdims=True) @ x
np.testing.assert_allclose(output, expected, atol=1e-5)
np.testing.assert_array_equal(output, again)
(said,) = [str(warning.message) for warning in caught]
print(thread_count(), said)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the library, and with the tests and the exporter, which name the copy."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "sdpa_xp", tree / NAME)
    for name in ("export", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    named = [*tree.glob("*.py"), *(tree / "export").rglob("*.py"), *(tree / "tests").rglob("*.py")]
    for file in [*named, *(tree / "tests" / "core").rglob("*.txt")]:
        file.write_text(re.sub(r"\bsdpa_xp\b", NAME, file.read_text()))
    return tree


def run(tree: Path, missing: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the tree, where some packages are missing."""
    (tree / "without.py").write_text(WITHOUT.format(missing=missing))
    program = "import runpy, sys, without; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__')"
    path = ":".join(str(tree / name) for name in ("", "export", "tests"))
    environment = {"PYTHONPATH": path, "PATH": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_no_file_imports_by_the_name(tree: Path) -> None:
    absolute = re.compile(r"^\s*(from|import) sdpa_xp\b|import_module\(\W*sdpa_xp\b", re.MULTILINE)
    assert [file for file in (tree / NAME).rglob("*.py") if absolute.search(file.read_text())] == []


def test_tests_of_core_pass_on_a_copy(tree: Path, pytestconfig: pytest.Config) -> None:
    """They import by names that the code makes, too. With --thin, some of them run."""
    few = [f"tests/core/{name}.py" for name in FEW]
    files = few if pytestconfig.getoption("--thin") else ["tests/core"]
    options = ["-q", "-p", "no:benchmark", "-p", "no:cacheprovider", "--backends=numpy", "--thin"]
    ran = run(tree, ["sdpa_xp"], "pytest", *options, *files)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert re.search(r"\d\d\d passed", ran.stdout)


def test_without_threadpoolctl_the_blas_keeps_its_threads(tree: Path) -> None:
    (tree / "threads.py").write_text(THREADS)
    ran = run(tree, ["sdpa_xp", "threadpoolctl"], "threads")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("1 copied_attention: without threadpoolctl the BLAS keeps its threads")


@pytest.mark.needs("torch")
def test_a_copy_works_beside_the_library(tree: Path) -> None:
    """Both register an operator with torch, and what one returns is no mask of the other."""
    program = f"""
import torch
import sdpa_xp, {NAME}
for library in (sdpa_xp, {NAME}):
    x = torch.ones(1, 2, 5, 8, requires_grad=True)
    attention = library.scaled_dot_product_attention
    attend = torch.compile(lambda x: attention(x, x, x, implementation="xp"), backend="eager")
    attend(x).sum().backward()
try:
    sdpa_xp.scaled_dot_product_attention(x, x, x, attn_mask={NAME}.masks.causal())
except TypeError as error:
    print(error)
"""
    (tree / "both.py").write_text(program)
    shutil.copytree(ROOT / "sdpa_xp", tree / "sdpa_xp", dirs_exist_ok=True)
    try:
        ran = run(tree, [], "both")
    finally:
        shutil.rmtree(tree / "sdpa_xp")
    assert ran.returncode == 0, ran.stderr
    assert "`attn_mask` must be" in ran.stdout
