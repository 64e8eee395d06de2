"""All that needs a GPU, in one run: `python tests/gpu/run.py results/gpu.json [--only NAME,...] [--quick]`.

Runs the core tests on torch's CUDA device and on CuPy, the `cuda` tests, the table of the benchmark and the
agreement table. One file says what they said, on which machine, with which versions and when, and is written
again after each of them; results.md beside it has the table. What passes its limit is ended, and the rest runs.
Exits 1 if anything failed. Needs no install: the packages of this checkout are taken.

`--device cpu` tries it without a GPU: NumPy stands where CuPy would.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks import machine

ROOT = Path(__file__).parents[2]

DISTRIBUTIONS = (
    "numpy",
    "torch",
    "cupy-cuda13x",
    "jax",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "array-api-compat",
    "ml_dtypes",
    "pytest",
    "hypothesis",
    "typer",
)
SECONDS = 570
"""For all of it: a machine may be lent for ten minutes."""

SAID = 16_000
"""Characters kept of what a step printed last."""

SETTINGS = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "export"), os.environ.get("PYTHONPATH")])
    ),
    "PYTHONUNBUFFERED": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # or JAX takes most of the memory from torch and CuPy
    "JAX_DEFAULT_MATMUL_PRECISION": "float32",  # else it is TF32 on a GPU
}
LIBRARIES = {"cuda": ("torch-cuda", "cupy"), "cpu": ("torch", "numpy")}
AGREEMENT, TABLE = "agreement", "table"


class Step(NamedTuple):
    """A command, and the seconds after which it is ended."""

    command: list[str]
    limit: float


def steps(device: str, quick: bool, folder: Path) -> dict[str, Step]:
    """What there is to run, by the names that --only takes."""
    python = sys.executable
    # The pinned versions warn of nothing; others may, and that is no failure.
    pytest = [python, "-m", "pytest", "-q", "--tb=short", "-W", "default"]
    spread = ["-n", "4"] if device == "cuda" and importlib.util.find_spec("xdist") else []
    cores = {
        f"core tests, {name}": Step([*pytest, *spread, "tests/core", f"--backends={name}"], 180)
        for name in LIBRARIES[device]
    }
    table = [python, "benchmarks/on_device.py", "--into", str(folder), "--device", device]
    agree = [python, "-m", "sdpa_xp_export", "agree", "--json"]
    return {
        **cores,
        "cuda tests": Step([*pytest, "tests/gpu", "-m", "cuda"], 120),
        TABLE: Step([*table, "--limit", "180", *(["--quick"] if quick else [])], 240),
        AGREEMENT: Step([*agree, *(["--backend", "numpy"] if device == "cpu" else [])], 120),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="the file of results")
    parser.add_argument("--only", metavar="NAME,...", help="some of the steps; a part of a name will do")
    parser.add_argument("--quick", action="store_true", help="the short table")
    parser.add_argument("--device", choices=tuple(LIBRARIES), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        known = steps(arguments.device, arguments.quick, Path(folder))
        chosen = _chosen(parser, known, arguments.only)
        return run(chosen, arguments.target, Path(folder), arguments.seconds)


def run(chosen: dict[str, Step], target: Path, folder: Path, seconds: float) -> int:
    """Each step; the exit code."""
    end = time.monotonic() + seconds
    results: dict[str, Any] = machine.facts(*DISTRIBUTIONS) | {"gpu": machine.gpu(), "steps": {}}
    for name, step in chosen.items():
        done, printed = _run(step._replace(limit=min(step.limit, end - time.monotonic())))
        results["steps"][name] = done
        if name == AGREEMENT:
            results[name] = _parsed(printed)
        elif name == TABLE and (folder / "on_device.json").exists():
            results[name] = _parsed((folder / "on_device.json").read_text())
            shutil.copyfile(folder / "on_device.md", target.with_suffix(".md"))
        target.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {done['ended']}, {done['seconds']} s\n{done['said'][-1500:]}\n", flush=True)
    return int(any(step["ended"] != "exit code 0" for step in results["steps"].values()))


def _chosen(parser: argparse.ArgumentParser, known: dict[str, Step], only: str | None) -> dict[str, Step]:
    parts = only.split(",") if only else [""]
    if unknown := [part for part in parts if not any(part in name for name in known)]:
        parser.error(f"--only: none of {', '.join(known)}: {', '.join(unknown)}")
    return {name: step for name, step in known.items() if any(part in name for part in parts)}


def _run(step: Step) -> tuple[dict[str, Any], str]:
    """How it ended and what it said; and what it printed to be read by a program."""
    start = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        ended = _ended(step, out, err)
        printed, complained = (_read(stream) for stream in (out, err))
    said = (printed[-SAID:] + complained[-SAID:]).strip()
    report = {
        "command": step.command[1:],
        "ended": ended,
        "seconds": round(time.monotonic() - start, 1),
        "said": said,
    }
    return report, printed


def _ended(step: Step, out: Any, err: Any) -> str:
    """Files, not pipes: what a process that is ended has started cannot hold them open."""
    if step.limit <= 0:
        return "no time was left"
    environment = os.environ | SETTINGS
    process = subprocess.Popen(
        step.command, cwd=ROOT, env=environment, stdout=out, stderr=err, start_new_session=True
    )
    try:
        return f"exit code {process.wait(step.limit)}"
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it
            process.wait(10)
        return f"ended after {step.limit:.0f} s"


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _parsed(text: str) -> Any:
    """JSON, or None of what was cut off."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text)


if __name__ == "__main__":
    sys.exit(main())
