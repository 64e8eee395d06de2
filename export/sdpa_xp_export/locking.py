"""Locks of files and folders that end with the process that holds them, whatever ends it (flock(2)).

Where a system or a file system has none, nobody can tell whether a save still runs, and nothing is removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = True


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed; False where another has it, or there are no locks."""
    if not HAS_LOCKS:
        return False
    try:
        flock(descriptor, LOCK_EX if wait else LOCK_EX | LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """One at a time: what changes the names of a folder; yields False where that cannot be had."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # of a folder that may not be listed, or on Windows
        yield False
        return
    try:
        yield lock(descriptor, wait=True)
    finally:
        os.close(descriptor)
