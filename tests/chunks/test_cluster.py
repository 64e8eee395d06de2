"""Calls on the workers of a cluster: results, a worker that dies, and workers with little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("on_workers.py")


@pytest.mark.slow
@pytest.mark.needs("dask", "distributed")
@pytest.mark.parametrize(
    "names", ["results death", "400MiB", pytest.param("1GiB", marks=pytest.mark.sampled(0))]
)
def test_on_workers(names: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), *names.split()],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
