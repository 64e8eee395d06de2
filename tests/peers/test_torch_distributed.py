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
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "meeting"], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
