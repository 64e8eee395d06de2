"""Files that are whole or not there, and that replace another file only if told to.

A file is written as `.<32 hex digits>.unfinished` beside its place, and gets its name when it is on the disk.
If the process is killed before, this file stays, and nothing else has changed.
"""

# Why not onnx_ir: an `onnx_ir.save` (1.1.0) that is killed may leave an old model with new data.

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .paths import PathArgument, free_target, reworded, taken_error

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

SECONDS = 10.0
"""The time that a writer waits for another one that changes the names in a folder, and may be stopped."""
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The errors by which file systems without hard links, such as FAT, refuse one."""


def publish(data: bytes, path: Path, argument: PathArgument, *, overwrite: bool = False) -> Path:
    """Write `data` to `path`, which then holds all of it or what it held before; return the real path."""
    with reworded(argument, path):
        target = free_target(path, argument, overwrite=overwrite)
        write_whole(target, lambda file: file.write(data), argument, overwrite=overwrite)
    return target


def write_whole(
    target: Path,
    fill: Callable[[BinaryIO], object],
    argument: PathArgument,
    *,
    overwrite: bool = False,
    like: Path | None = None,
    at_last: Callable[[], object] = lambda: None,
) -> None:
    """Write a file, which is not there before `fill` has returned and the contents are on the disk.

    Args:
        target: The file.
        fill: Writes the contents.
        argument: The argument that names the file, for messages.
        overwrite: Whether the file may replace another one.
        like: The file whose permissions it gets, if that exists; by default the one that it replaces. At no
            time may more users read the new file.
        at_last: Called before the file gets its name, while no other process gives names in the folder.
    """
    unfinished, opened, model = target.with_name(f".{uuid.uuid4().hex}.unfinished"), list[int](), like or target
    mode = stat.S_IMODE(model.stat().st_mode) & 0o777 if model.exists() else None
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)

    def write() -> None:
        _open_into(opened, unfinished, flags, 0o666 if mode is None else mode & 0o600)
        if mode is not None:
            with suppress(PermissionError):  # a file system without permissions
                os.chmod(unfinished, mode)
        with open(opened[-1], "wb", closefd=False) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        _close_all(opened)  # Windows renames no open file
        with suppress(OSError):  # the folder may not be listed, or the system is Windows
            _open_into(opened, target.parent, os.O_RDONLY)
            lock(opened[-1], SECONDS)
        at_last()
        give_name(unfinished, target, argument, overwrite=overwrite)

    def tidy() -> None:
        _close_all(opened)
        unfinished.unlink(missing_ok=True)

    tidied(write, tidy)


def tidied(write: Callable[[], None], tidy: Callable[[], None]) -> None:
    """Call `write` and then `tidy`, whatever happens.

    An interrupt may come at any line, also in `tidy`: so it runs twice then.
    """
    try:
        try:
            write()
        finally:
            tidy()
    except BaseException:
        tidy()
        raise


def give_name(unfinished: Path, target: Path, argument: PathArgument, *, overwrite: bool) -> None:
    """Give the finished file its name, unless it is taken, in one step: no other writer can come between."""
    try:
        if overwrite:
            unfinished.replace(target)
        else:
            os.link(unfinished, target)
    except OSError as error:
        if overwrite or error.errno not in (errno.EEXIST, *_NO_LINKS):
            raise
        if error.errno == errno.EEXIST or target.exists():
            raise taken_error(target, argument) from None
        unfinished.replace(target)  # here alone another program could come between


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


# In both of these, C calls the system and keeps or drops the descriptor. Between two steps of Python an
# interrupt could come, and the descriptor, with its lock, would stay for the life of the process.


def _open_into(opened: list[int], path: Path, flags: int, mode: int = 0o777) -> None:
    """Open a file or folder, and append its descriptor."""
    opened.extend(map(os.open, [path], [flags], [mode]))


def _close_all(opened: list[int]) -> None:
    """Remove and close all descriptors."""
    with suppress(IndexError):  # the end of the list
        deque(map(os.close, iter(opened.pop, None)), maxlen=0)
