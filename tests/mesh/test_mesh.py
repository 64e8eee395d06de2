"""Calls on several devices of a JAX mesh: results, gradients, what is sent, and what is computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("on_devices.py")


@pytest.mark.slow
@pytest.mark.needs("jax")
@pytest.mark.parametrize("names", ["balance results", "dtypes others sent memory plain"])
def test_on_devices(names: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *names.split()], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
