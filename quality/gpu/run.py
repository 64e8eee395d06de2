"""All that needs a GPU, in one run of less than 10 minutes: `python quality/gpu/run.py results/gpu.json`.

It first asks which packages are there and which libraries find a GPU, and skips the steps that lack one;
`--check` only asks. Then it runs the table of the benchmark, the tests of features and exported graphs, the
core tests on CuPy and torch, and the agreement table. It installs nothing: this folder is taken as it is, and
packages may lie in the folders of PYTHONPATH, or be wheels there. It takes any version, and notes one that
pyproject.toml calls too old.

The file of results, and the page beside it with the suffix .md, replace those that are there, unless nothing
can run. Both are written when the first step starts, every few seconds, and after each step: if the run is
ended, they have what failed before. A step gets a part of the time that is left. Exits 1 if something failed
or nothing ran, and 130 after an interrupt.

`--device cpu` tries the run without a GPU, with NumPy in CuPy's place; the page says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "tests")]

from benchmarks import machine  # noqa: E402
from quality.gpu import needs, page  # noqa: E402
from quality.gpu.child import ENDING, Attempt  # noqa: E402
from quality.gpu.steps import AGREEMENT, LIBRARIES, OPTIONAL, TABLE, Step, all_steps, limit  # noqa: E402

SECONDS = 570.0
"""For all of it: a machine may be lent for ten minutes."""
ANSWER = 60.0
"""Seconds in which a library must find its GPU; at most an eighth of the run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, nargs="?", help="the file of results, with the suffix .json")
    parser.add_argument("--only", metavar="NAME,...", help="some of the steps; a part of a name will do")
    parser.add_argument("--device", choices=tuple(LIBRARIES), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--check", action="store_true", help="only say what is missing")
    arguments = parser.parse_args()
    target, device, seconds = arguments.target, arguments.device, arguments.seconds
    if (target is None) != arguments.check or (target and (target.suffix != ".json" or target.is_dir())):
        parser.error(f"name a file of results that ends in .json, or pass --check; got {target}")
    if target is not None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=target.parent).close()
        except OSError as error:
            parser.error(f"cannot write {target}: {error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` sends it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = all_steps(device, folder)
        parts = [part for part in (arguments.only or "").split(",") if part] or [""]
        if unknown := [part for part in parts if not any(part in name for name in known)]:
            parser.error(f"--only: none of {', '.join(known)}: {', '.join(unknown)}")
        steps = {name: step for name, step in known.items() if any(part in name for part in parts)}
        try:
            return (
                check(steps, device, folder) if target is None else run(steps, target, folder, seconds, device)
            )
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130


def check(steps: Mapping[str, Step], device: str, folder: Path) -> int:
    """Print what is here, and which steps would be skipped; return 1 if one would."""
    about, reasons = facts(steps, device), lacking(steps, device, folder, ANSWER)
    print(about["gpu"] or "no GPU", f"Python {about['python']}", sep="\n")
    for module, text in about["packages"].items():
        print(f"{module}: {text}")
    for name in steps:
        print(f"{name}: {reasons.get(name, 'runs')}")
    return int(bool(reasons))


def run(
    steps: Mapping[str, Step], target: Path, folder: Path, seconds: float = SECONDS, device: str = "cuda"
) -> int:
    """Run the steps, write the results, and return the exit code."""
    end = time.monotonic() + seconds - ENDING
    results = facts(steps, device)
    reports = results["steps"]
    reasons = lacking(steps, device, folder, min(ANSWER, seconds / 8))
    reports |= {name: {"outcome": "skipped", "reason": reason} for name, reason in reasons.items()}
    waiting = {name: step for name, step in steps.items() if name not in reasons}
    for name in reasons:
        print(page.of_step(name, reports[name]), flush=True)
    if not waiting:
        print(f"nothing can run here, so {target} was not written", file=sys.stderr)
        return 1
    write(results, target, folder)
    while waiting:
        shares = sum(step.share for step in waiting.values())
        name, step = next(iter(waiting.items()))
        del waiting[name]
        allowed = limit(end - time.monotonic(), step.share, shares)
        if allowed == 0:
            reports[name] = {"outcome": "failed", "reason": "no time was left"}
            continue
        attempt = Attempt(step.command, folder / name, allowed)
        try:
            while attempt.is_running():
                reports[name] = attempt.report()
                write(results, target, folder)
        finally:
            attempt.end()
            reports[name] = attempt.report()
            if name.startswith(AGREEMENT):
                results.setdefault(AGREEMENT, []).extend(attempt.printed_rows())
            write(results, target, folder)
            print(page.of_step(name, reports[name]), flush=True)
    write(results, target, folder)
    outcomes = {report["outcome"] for report in reports.values()}
    return int("passed" not in outcomes or not outcomes <= {"passed", "skipped"})


def facts(steps: Mapping[str, Step], device: str) -> dict[str, Any]:
    """Return what is known before a step runs."""
    modules = dict.fromkeys([*(module for step in steps.values() for module in step.needs), *OPTIONAL])
    return {
        **machine.facts(),
        "device": device,
        "gpu": machine.gpu() if device == "cuda" else "",
        "packages": {module: needs.described(module) for module in modules},
        "steps": {name: {"outcome": "not begun"} for name in steps},
    }


def lacking(steps: Mapping[str, Step], device: str, folder: Path, seconds: float) -> dict[str, str]:
    """Return why steps are skipped, by their names."""
    reasons = {}
    for name, step in steps.items():
        if absent := [module for module in dict.fromkeys(step.needs) if not needs.is_installed(module)]:
            reasons[name] = f"{', '.join(absent)} not installed"
    if device == "cpu":
        return reasons
    libraries = {library for name, step in steps.items() if name not in reasons for library in step.devices}
    without = needs.without_device(libraries, folder, seconds)
    for name, step in steps.items():
        if name not in reasons and step.devices and without.keys() >= {*step.devices}:
            reasons[name] = "; ".join(without[library] for library in step.devices)
    return reasons


def write(results: dict[str, Any], target: Path, folder: Path) -> None:
    """Replace the file of results and its page, each as a whole, with the table as far as it was measured."""
    numbers, table = folder / "on_device.json", folder / "on_device.md"
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # it may just be written
        results[TABLE] = json.loads(numbers.read_text())
    text = page.page(results, table.read_text() if table.exists() else "")
    for path, content in ((target, json.dumps(results, indent=1) + "\n"), (target.with_suffix(".md"), text)):
        part = path.with_name(f"{path.name}.part")
        part.write_text(content)
        part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
