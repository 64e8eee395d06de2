"""Locks of files and folders, which end with the process that holds them, whatever ends it (flock(2)).

If a system or a file system has no locks, nobody can tell whether a save still runs, and nothing is removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = True


SECONDS = 10.0
"""The time that a writer waits for another one that changes the names in a folder, and may be stopped."""


def lock(descriptor: int, seconds: float = 0.0) -> bool:
    """Lock an open file or folder until it is closed; False if another process has it or there are no locks."""
    until = time.monotonic() + seconds
    while HAS_LOCKS:
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)
        except OSError:
            return False
        else:
            return True
    return False


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Let one process at a time change the names in a folder; yield False if there is no lock."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # the folder may not be listed, or the system is Windows
        yield False
        return
    try:
        yield lock(descriptor, SECONDS)
    finally:
        os.close(descriptor)
