"""Locks of files and folders, which end with the process that holds them, whatever ends it (flock(2)).

If a system or a file system has no locks, nobody can tell whether a save still runs, and nothing is removed.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
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


def unlock(descriptor: int) -> None:
    """Give a lock back before the file or folder is closed."""
    if HAS_LOCKS:
        with suppress(OSError):
            flock(descriptor, LOCK_UN)


# In each of these, C both calls the system and keeps or drops the descriptor. Between two steps of Python an
# interrupt could come, and the descriptor, with its lock, would stay for the life of the process.


def open_into(descriptors: list[int], path: Path, flags: int, mode: int = 0o777) -> None:
    """Open a file or folder, and append its descriptor."""
    descriptors.extend(map(os.open, [path], [flags], [mode]))


def close_last(descriptors: list[int]) -> None:
    """Remove and close the last descriptor."""
    deque(map(os.close, map(descriptors.pop, [-1])), maxlen=0)


def close_all(descriptors: list[int]) -> None:
    """Remove and close all descriptors; negative ones are closed already."""
    with suppress(IndexError):  # the end of the list
        deque(map(os.close, filter((-1).__lt__, iter(descriptors.pop, None))), maxlen=0)
