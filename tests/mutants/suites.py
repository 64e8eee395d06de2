"""The runs of pytest whose tests judge a mutant, and which of their tests run which lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path

import coverage
from mutants.sites import Mutant

SUITES = {
    "numpy": ["tests/core", "--backends=numpy"],
    "rest": [
        f"tests/{name}" for name in ("export", "conformance", "peers", "examples", "agreement", "packaging")
    ],
    "doctest": ["--doctest-modules", "sdpa_xp", "export/sdpa_xp_export"],
    **{name: ["tests/core", f"--backends={name}"] for name in ("torch", "dask", "jax", "mlx")},
}
"""In the order in which they are tried."""
FEW_FILES, FEW_SECONDS = 3, 4.0


def pytest(tree: Path, arguments: list[str], seconds: float | None = None, **environment: str) -> int | None:
    """Run pytest in a copy of the repository, with one thread; None if it takes longer than `seconds`."""
    paths = [tree, tree / "export", tree / "tests", *(Path(p) for p in sys.path if p.startswith("/"))]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with (tree / "pytest.log").open("w") as log:
        try:
            return subprocess.run(
                command,
                cwd=tree,
                env=os.environ | settings | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return None


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
        pytest(
            tree,
            ["-p", "mutants.recorder", *SUITES[self.suite]],
            MUTANTS_RECORDING=str(self.folder / f"{self.suite}.json"),
            MUTANTS_SOURCES=os.pathsep.join(str(tree / name) for name in ("sdpa_xp", "export/sdpa_xp_export")),
        )

    @cached_property
    def seconds(self) -> dict[str, float]:
        """How long each test took that passed."""
        found: dict[str, float] = json.loads((self.folder / f"{self.suite}.json").read_text())["passed"]
        return found

    @cached_property
    def data(self) -> coverage.CoverageData:
        read = coverage.CoverageData(str(self.folder / f"{self.suite}.coverage"))
        read.read()
        return read

    def lines(self, file: str) -> dict[int, list[str]]:
        """Which tests run each line of a file; "" is what runs when the file is imported."""
        paths = [path for path in self.data.measured_files() if path.endswith("/" + file)]
        return self.data.contexts_by_lineno(paths[0]) if paths else {}

    def tests_of(self, mutant: Mutant, most: float) -> list[str]:
        """The tests that run the line of a mutant, of each function the fastest first; `most` seconds of them.

        What runs when a module is imported is judged by all the tests that run any line of the file.
        """
        lines = self.lines(mutant.file)
        stop = mutant.line + mutant.before.count("\n")
        tests = {name for line in range(mutant.line, stop + 1) for name in lines.get(line, ())}
        if "" in tests:
            tests = {name for each in lines.values() for name in each}
        return self._within(sorted(tests & self.seconds.keys()), most)

    def _within(self, tests: list[str], most: float) -> list[str]:
        ranked = []
        for _, alike in groupby(tests, key=lambda name: name.partition("[")[0]):
            ranked += list(enumerate(sorted(alike, key=self.seconds.__getitem__)))
        chosen, total = [], 0.0
        for _, name in sorted(ranked, key=lambda at: (at[0], self.seconds[at[1]])):
            total += self.seconds[name]
            if total > most and chosen:
                break
            chosen.append(name)
        return chosen
