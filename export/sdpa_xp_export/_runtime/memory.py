"""The peak of a process' memory while something runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_above(run: Callable[[], T]) -> tuple[T, int | None]:
    """Return what `run` returns, and by how many bytes the process grew at most while it ran.

    The bytes are None if the system cannot tell; Linux can.
    """
    try:
        _RESET.write_text("5")  # resets the peak to the present size, see proc(5)
        start = kilobytes("VmRSS")
    except OSError:
        return run(), None
    result = run()
    return result, max(0, kilobytes("VmHWM") - start) * 1024


def kilobytes(name: str) -> int:
    """Return a number of the process' status, see proc(5)."""
    line = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if line is None:
        raise OSError(f"no {name} in {_STATUS}")
    return int(line[1])
