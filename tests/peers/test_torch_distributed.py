"""DTensor and context parallelism of torch: refused in a sentence that names the way, and the way is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.needs("torch")
@pytest.mark.slow
def test_tensors_on_two_processes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("on_processes.py")
    command = [sys.executable, script, tmp_path / "meeting"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
