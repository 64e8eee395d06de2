"""All that needs a GPU, in one run: `python tests/gpu/run.py results.json`.

Runs the core tests on CuPy and on torch's CUDA device, the `cuda` tests and the agreement table, and writes
one file with what they said, the machine, the versions and the date. Exits 1 if anything failed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = ("numpy", "torch", "onnxruntime-gpu", "onnx", "array-api-compat", "cupy-cuda13x", "jax")
PYTEST = [sys.executable, "-m", "pytest", "-q", "--tb=short"]
STEPS = {
    "core tests, CuPy": [*PYTEST, "tests/core", "--backends=cupy"],
    "core tests, torch CUDA": [*PYTEST, "tests/core", "--backends=torch-cuda"],
    "cuda tests": [*PYTEST, "tests/gpu"],
    "agreement": [sys.executable, "-m", "sdpa_xp_export", "agree", "--json"],
}


def main(target: Path) -> int:
    steps = {name: _run(command) for name, command in STEPS.items()}
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": {"system": platform.platform(), "gpu": _gpu()},
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "steps": steps,
    }
    target.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(step["code"] for step in steps.values()))


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {"command": command[2:], "code": done.returncode, "said": (done.stdout + done.stderr)[-8000:]}


def _gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
