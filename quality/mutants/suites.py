"""The runs of pytest whose tests judge a mutant, and which of their tests run which lines."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from quality.mutants.sites import Mutant

if TYPE_CHECKING:
    import coverage

SUITES = {
    "numpy": ["tests/core", "--backends=numpy", "--thin"],
    "rest": [
        *(f"tests/{name}" for name in ("export", "peers", "examples", "packaging", "chunks", "mesh")),
        *(f"tests/{name}" for name in ("memory", "refusals", "standins", "tools")),
        *(
            f"quality/{name}"
            for name in ("conformance", "agreement", "derivatives", "faults", "gpu", "runtime")
        ),
        "--thin",
    ],
    "doctest": ["--doctest-modules", "sdpa_xp", "export/sdpa_xp_export", "--ignore=sdpa_xp/integrations"],
    **{
        name: ["tests/core", f"--backends={name}", "--thin"]
        for name in ("torch", "strict-CPU_DEVICE", "dask", "mlx", "cupy-rules", "jax")
    },
}
"""In the order in which they are tried; thin, as `make test` runs them."""
LEFT_OUT = {
    "tests/site": "asks about pages, and builds them",
    "quality/test_cpus.py": "starts processes with the switches of older CPUs",
    "quality/budgets": "counts the lines of the packages",
    "quality/mutants": "reads the text of the lines that a mutant changes",
}
"""The folders of tests that judge no mutant, with the reason."""
PRELOADED = ("numpy", "ml_dtypes", "onnx", "onnxruntime", "torch", "array_api_strict")
FEW_FILES, FEW_SECONDS = 3, 4.0


def pytest(tree: Path, arguments: list[str], seconds: float = math.inf, **environment: str) -> int | None:
    """Run pytest in a copy of the repository; None if it takes longer than `seconds`.

    In a fork of this process, which has imported the libraries but neither package nor its tests.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    child = os.fork()
    if not child:
        _run_and_exit(tree, arguments, environment)
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run_and_exit(tree: Path, arguments: list[str], environment: dict[str, str]) -> None:
    status = 1
    try:
        os.setsid()
        os.chdir(tree)
        log, nothing = (
            os.open("pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            os.open(os.devnull, os.O_RDONLY),
        )
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        paths = [str(tree / part) for part in ("", "export", "tests")]
        sys.path[:0] = paths
        os.environ.update(environment, PYTHONPATH=os.pathsep.join(sys.path))
        import pytest

        status = int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def quick(tests: list[str], seconds: Mapping[str, float]) -> list[str]:
    """Of these tests the first few, of few files, which is where most mutants end."""
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))[:FEW_FILES]
    near = [name for name in tests if name.partition("::")[0] in files]
    return [
        name
        for name, spent in zip(near, accumulate(seconds[x] for x in near), strict=True)
        if spent < FEW_SECONDS
    ]


@dataclass(frozen=True)
class Recording:
    """What the tests of one suite ran, in a tree that was not changed."""

    suite: str
    folder: Path

    def make(self, tree: Path) -> None:
        for left in self.folder.glob(f"{self.suite}.coverage*"):
            left.unlink()
        status = pytest(
            tree,
            ["-p", "quality.mutants.recorder", *SUITES[self.suite]],
            MUTANTS_RECORDING=str(self._results),
            MUTANTS_SOURCES=os.pathsep.join(str(tree / name) for name in ("sdpa_xp", "export/sdpa_xp_export")),
        )
        if not self._results.exists():
            log = (tree / "pytest.log").read_text()[-2000:]
            raise RuntimeError(f"the recording of {self.suite} ended early, with {status}: {log}")
        for name in json.loads(self._results.read_text())["failed"]:
            print(f"judges nothing, for it fails in the program itself: {name}", flush=True)

    @property
    def _results(self) -> Path:
        return self.folder / f"{self.suite}.json"

    @cached_property
    def seconds(self) -> dict[str, float]:
        """How long each test took that passed."""
        passed: dict[str, float] = json.loads(self._results.read_text())["passed"]
        return passed

    @cached_property
    def data(self) -> coverage.CoverageData:
        import coverage  # the tests have no need of it

        data = coverage.CoverageData(str(self.folder / f"{self.suite}.coverage"))
        data.read()
        return data

    def lines(self, file: str) -> dict[int, list[str]]:
        """Which tests run each line of a file; "" is what runs when the file is imported."""
        paths = [path for path in self.data.measured_files() if path.endswith("/" + file)]
        return self.data.contexts_by_lineno(paths[0]) if paths else {}

    def tests_of(self, mutant: Mutant, most: float) -> list[str]:
        """The tests that run the line of a mutant, of each function the fastest first; `most` seconds of them.

        What runs when a module is imported, such as a default, is judged by all that run its function or file.
        """
        lines = self.lines(mutant.file)
        stop = mutant.line + mutant.before.count("\n")
        tests = {name for line in range(mutant.line, stop + 1) for name in lines.get(line, ())}
        if mutant.at_import or "" in tests:
            first, last = mutant.scope
            inner = {name for line, names in lines.items() if first <= line <= last for name in names}
            tests = inner if inner - {""} else {name for names in lines.values() for name in names}
            if not tests - {""}:  # the file is imported, and no test runs a line of it
                tests = {*self.seconds}
        return self._within(sorted(tests & self.seconds.keys()), most)

    def _within(self, tests: list[str], most: float) -> list[str]:
        ranked = []
        for _, alike in groupby(tests, key=lambda name: name.partition("[")[0]):
            ranked += list(enumerate(sorted(alike, key=self.seconds.__getitem__)))
        chosen, total = [], 0.0
        for _, name in sorted(ranked, key=lambda ranked_name: (ranked_name[0], self.seconds[ranked_name[1]])):
            total += self.seconds[name]
            if total > most and chosen:
                break
            chosen.append(name)
        return chosen
