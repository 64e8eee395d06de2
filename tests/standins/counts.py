"""What a call costs on a GPU: values that the host waits for, copies from the host, and launched kernels.

The stand-ins of array libraries report here while a test counts.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counts:
    """Counts by what happened and, but for launches, the line of the library where it did."""

    waits: Counter[str] = field(default_factory=Counter)
    """Reads of values by the host. Each waits until the device has computed everything before it."""
    copies: Counter[str] = field(default_factory=Counter)
    """Copies of arrays and lists from the host to the device."""
    launches: Counter[str] = field(default_factory=Counter)
    """Kernels that were started, by name."""


_counting: list[Counts] = []


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what happens inside of the context."""
    _counting.append(Counts())
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


def wait(what: str) -> None:
    """Count a value that the host reads."""
    for counts in _counting:
        counts.waits[f"{what} at {_place()}"] += 1


def copy(what: str) -> None:
    """Count a copy from the host to the device."""
    for counts in _counting:
        counts.copies[f"{what} at {_place()}"] += 1


def launch(kernel: str) -> None:
    """Count a kernel that is started."""
    for counts in _counting:
        counts.launches[kernel] += 1


def _place() -> str:
    """The innermost line of the library that is being computed, such as caches/paged.py:231."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        _, package, path = frame.f_code.co_filename.rpartition("/sdpa_xp/")
        if package:
            return f"{path}:{frame.f_lineno}"
    return "the test"
