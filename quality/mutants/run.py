"""Draw mutants, run for each the tests that run its line, and write which test functions kill which mutant.

    PYTHONPATH=tests python -m quality.mutants.run --seed 15 --count 200
    PYTHONPATH=tests python -m quality.mutants.run --seed 15 --count 20 --first

The tests are recorded first, unless `build/mutants` has a recording. A mutant is written into a copy. With
`--first`, a mutant ends with the first test that fails: a slice for every day.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import tomllib
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quality.mutants.draw import draw
from quality.mutants.sites import Mutant
from quality.mutants.suites import SUITES, Recording, pytest, quick

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "mutants"
HERE = Path(__file__).parent
MOST = {"numpy": 20.0, "rest": 30.0}
"""Seconds of tests a mutant; `OTHERS` for the suites that are not named."""
OTHERS = 10.0
NAME = ("file", "function", "text", "before", "after")
"""What a mutant is known by in `equivalent.toml`."""
FAILED, NOT_RUN = 1, 5
"""Exit statuses of pytest: tests failed, or none was collected."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", default="", help="mutants of files whose path has this in it")
    parser.add_argument("--first", action="store_true", help="end a mutant with the first test that fails")
    parser.add_argument("--go-on", action="store_true", help="do not run again what was killed before")
    parser.add_argument("--suites", default=",".join(SUITES), help="comma-separated, of %(default)s")
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    drawn = [m for m in draw(ROOT, arguments.count, arguments.seed) if arguments.only in m.file]
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder) / "tree")
        recordings = recorded(tree, arguments.suites.split(","))
        results = BUILD / f"{arguments.seed}.json"
        before = (
            {(*outcome["name"],): outcome for outcome in json.loads(results.read_text())}
            if results.exists()
            else {}
        )
        outcomes, known = [], listed()
        for number, mutant in enumerate(drawn, 1):
            outcome = before.get(mutant.name, {})
            if mutant.name in known:
                outcome = {"outcome": "equivalent"}
            elif not (arguments.go_on and outcome.get("outcome") == "killed"):
                outcome = judged(tree, mutant, number, recordings, arguments.first)
            outcomes.append({**asdict(mutant), **outcome, "name": mutant.name})
            print(
                f"{number}/{len(drawn)} {outcome['outcome']} {mutant.file}:{mutant.line} {mutant.after!r}",
                flush=True,
            )
            results.write_text(json.dumps(outcomes, indent=1))
    # A slice is no result, and with `--first` other tests may kill, too.
    whole = not (arguments.only or arguments.first) and arguments.suites == ",".join(SUITES)
    summarise(
        arguments.seed, drawn, outcomes, ROOT / "results" / "mutants.json" if whole else BUILD / "results.json"
    )


def copied(tree: Path) -> Path:
    """A copy of what git has and of what is new, at `tree`."""
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    return tree


def recorded(tree: Path, suites: list[str]) -> list[Recording]:
    BUILD.mkdir(parents=True, exist_ok=True)
    recordings = [Recording(name, BUILD) for name in suites]
    for recording in recordings:
        if not (BUILD / f"{recording.suite}.json").exists():
            print(f"recording {recording.suite}", flush=True)
            recording.make(tree)
    return recordings


def judged(
    tree: Path, mutant: Mutant, number: int, recordings: list[Recording], first: bool
) -> dict[str, object]:
    """Which tests fail of those that run the mutant's line; with `first`, the first of them."""
    path = tree / mutant.file
    source, when = path.read_text(), path.stat()
    path.write_text(mutant.applied(source))
    os.utime(path, (number, number))  # compiled files are known by this time, in whole seconds
    tried, killers = 0, Counter[str]()
    try:
        plans = [(r, r.tests_of(mutant, MOST.get(r.suite, OTHERS))) for r in recordings]
        early = [(r, quick(tests, r.seconds)) for r, tests in plans] if first else []
        for recording, tests in [*early, *plans]:
            tried += len(tests)
            failed = failures(tree, recording, tests, first) if tests else []
            # A parametrised test is one function, whatever its cases and its library.
            killers.update(name.partition("[")[0] for name in failed)
            if killers and first:
                break
    finally:
        path.write_text(source)
        os.utime(path, ns=(when.st_atime_ns, when.st_mtime_ns))
    outcome = "killed" if killers else "survived" if tried else "not run"
    return {"outcome": outcome, "killers": dict(sorted(killers.items())), "tests": tried}


def failures(tree: Path, recording: Recording, tests: list[str], first: bool) -> list[str]:
    """The tests that failed, or how the run ended without one; empty if all pass."""
    chosen = tree / "chosen.list"
    chosen.write_text("\n".join(tests))
    failed = chosen.with_suffix(".failed")
    failed.unlink(missing_ok=True)
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    options = [option for option in SUITES[recording.suite] if option.startswith("--")]
    limit = 60 + 4 * sum(recording.seconds[name] for name in tests)
    arguments = [*["-x"] * first, "-p", "quality.mutants.chosen", *options, *files]
    status = pytest(tree, arguments, limit, MUTANTS_CHOSEN=str(chosen))
    if failed.exists():
        return failed.read_text().splitlines()
    if status in (FAILED, NOT_RUN):
        raise RuntimeError(f"no test failed, and yet: {(tree / 'pytest.log').read_text()[-2000:]}")
    return [] if status == 0 else [f"the run ended with {'a timeout' if status is None else status}"]


def listed() -> set[tuple[str, ...]]:
    """The names of the mutants that are known to change nothing."""
    read = tomllib.loads((HERE / "equivalent.toml").read_text())
    return {tuple(mutant[key] for key in NAME) for mutant in read["mutant"]}


def summarise(seed: int, drawn: list[Mutant], outcomes: list[dict[str, Any]], results: Path) -> None:
    number = Counter(str(outcome["outcome"]) for outcome in outcomes)
    left = [
        m for m, outcome in zip(drawn, outcomes, strict=True) if outcome["outcome"] in ("survived", "not run")
    ]
    killed, same = number["killed"], number["equivalent"]
    print(f"seed {seed}: of {len(drawn)} mutants {same} are equivalent, {killed} were killed")
    print(f"{100 * killed / max(len(drawn) - same, 1):.1f} % of those that are not equivalent; what survived:")
    for m in left:
        print(f"  {m.file}:{m.line} {m.function}: {m.before!r} -> {m.after!r}")
    kept = json.loads(results.read_text()) if results.exists() else {}
    names = [{key: getattr(m, key) for key in NAME} for m in left]
    kept[str(seed)] = {"drawn": len(drawn), "killed": killed, "equivalent": same, "survived": names}
    results.write_text(json.dumps(kept, indent=2) + "\n")
    rows = [
        {**{key: getattr(m, key) for key in NAME}, "killers": outcome["killers"]}
        for m, outcome in zip(drawn, outcomes, strict=True)
        if outcome.get("killers")
    ]
    matrix = results.with_name("kills.json")
    kills = json.loads(matrix.read_text()) if matrix.exists() else {}
    matrix.write_text(json.dumps(kills | {str(seed): rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
