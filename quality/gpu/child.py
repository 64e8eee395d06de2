"""Processes of the run on a GPU, which are ended together with all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quality.gpu import findings

ROOT = Path(__file__).parents[2]
ENDING = 5.0
"""Seconds that a process gets to end after it was killed: a driver may keep it, and then it is left behind."""
EVERY = 5.0
"""Seconds between two looks at a step that runs."""
NO_TEST = 5
"""The exit code of pytest if there is no test, such as in a file that is skipped as a whole."""
PRINTED = 4_000
"""Characters kept of what a step printed last, and of its errors."""

SETTINGS = {
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT), str(ROOT / "export"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
    "PYTHONUNBUFFERED": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # or JAX takes most of the memory from torch and CuPy
    "JAX_DEFAULT_MATMUL_PRECISION": "float32",  # else it is TF32 on a GPU
    "CUPY_TF32": "0",
    # CuPy compiles hundreds of kernels. All processes share them, and so does the next run.
    "CUPY_CACHE_DIR": os.environ.get("CUPY_CACHE_DIR", str(ROOT / "build/cupy")),
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For tests in several processes."""


class Child:
    """Python with some arguments, in the top folder.

    It prints to files, not to pipes: a process that it started cannot hold them open.
    """

    def __init__(self, arguments: Sequence[str], files: Path) -> None:
        self.files = [files.with_name(f"{files.name}.{stream}") for stream in ("out", "err")]
        with self.files[0].open("wb") as out, self.files[1].open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=os.environ | SETTINGS | (ONE_THREAD if "-n" in arguments else {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def code(self, seconds: float) -> int | None:
        """Return the exit code once there is one, or None after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(0.0, seconds))
        return None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.code(ENDING)

    def printed(self) -> tuple[str, str]:
        """Return the standard output and the errors so far."""
        out, err = (file.read_text(errors="replace") for file in self.files)
        return out, err


class Attempt:
    """A step that runs until its limit, and what it has said so far."""

    def __init__(self, command: Sequence[str], files: Path, limit: float) -> None:
        # A step that is told its limit stops a little earlier, by itself.
        self.command = [part.replace("{seconds}", f"{0.8 * limit:.0f}") for part in command]
        self.is_pytest = self.command[:2] == ["-m", "pytest"]
        self.findings = files.with_name(f"{files.name}.jsonl")
        writer = ["-p", "quality.gpu.findings", f"--findings={self.findings}"] if self.is_pytest else []
        self.limit, self.start, self.outcome = limit, time.monotonic(), ("running", "")
        self.child = Child([*self.command, *writer], files)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def is_running(self) -> bool:
        """Wait a little; return whether the step still runs and may."""
        code = self.child.code(min(EVERY, self.limit - self.seconds))
        if code is not None:
            self.outcome = self._outcome(code)
        elif self.seconds >= self.limit:
            self.outcome = "failed", f"ended after {self.limit:.0f} s"
        return self.outcome[0] == "running"

    def end(self) -> None:
        if self.outcome[0] == "running":
            self.outcome = "failed", "interrupted"
        self.child.end()

    def _outcome(self, code: int) -> tuple[str, str]:
        if self.is_pytest and code in (0, NO_TEST):
            ran = findings.read(self.findings)
            return ("passed", "") if ran["passed"] else ("skipped", "; ".join(ran["skipped"]) or "no test ran")
        if code < 0:
            return "failed", f"ended by {signal.Signals(-code).name}"
        return ("failed", f"exit code {code}") if code else ("passed", "")

    def report(self) -> dict[str, Any]:
        """Return how it ended, or that it runs, and the tests that it ran."""
        outcome, reason = self.outcome
        out, err = self.child.printed()
        return {
            "outcome": outcome,
            "reason": reason,
            "seconds": round(self.seconds, 1),
            "limit": round(self.limit, 1),
            "command": self.command,
            **(findings.read(self.findings) if self.is_pytest else {}),
            "printed": "" if outcome == "passed" else (out[-PRINTED:] + err[-PRINTED:]).strip(),
        }

    def printed_rows(self) -> list[Any]:
        """Return the list of JSON that it printed, or nothing of one that was cut off."""
        with contextlib.suppress(json.JSONDecodeError):
            return list(json.loads(self.child.printed()[0]))
        return []
