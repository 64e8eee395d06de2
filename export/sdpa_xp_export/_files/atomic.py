"""Files that are whole or not there, and that replace another file only if told to.

A file is written under the name `.<32 hex digits>.unfinished`, which the writer keeps locked. A later writer in
the folder removes such files that nobody has locked: a process left them that was killed. Locks end with the
process that holds them, whatever ends it (flock(2)). If a system or a file system has none, nobody can tell
whether a save still runs, and nothing is removed.
"""

# Why not onnx_ir and filelock: a killed `onnx_ir.save` (1.1.0) leaves its temporary file for ever, or an old
# model with new data; a `FileLock` (4.2) leaves its lock beside the model.

from __future__ import annotations

import errno
import os
import re
import stat
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

from sdpa_xp_export._files.paths import PathArgument, free_target, reworded, taken_error

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

SECONDS = 10.0
"""The time that a writer waits for another one that changes the names in a folder, and may be stopped."""
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The errors by which file systems without hard links, such as FAT, refuse one."""

_UNFINISHED = re.compile(r"\.([0-9a-f]{32})(?:\.\w+)?\.unfinished")

_CLOSED = -1
T = TypeVar("T")
Remove = Callable[[str, Path], None]
"""Removes the other files that the dead writer of that number left in a folder."""


def publish(data: bytes, path: Path, argument: PathArgument, *, overwrite: bool = False) -> Path:
    """Write `data` to `path`, which then holds all of it or what it held before; return the real path."""
    with reworded(argument, path):
        target = free_target(path, argument, overwrite=overwrite)
        writer = Writer(target)

        def write() -> None:
            unfinished = writer.create(writer.marker)
            writer.write(unfinished, lambda file: file.write(data))
            give_name(writer, unfinished, argument, overwrite=overwrite)

        write_with(writer, write)
    return target


def write_with(
    writer: Writer, write: Callable[[], None], remove: Remove = lambda _number, _folder: None
) -> None:
    """Remove what dead writers left in the folder, call `write`, and leave no unfinished file or lock behind.

    An interrupt may come at any line, also at the lines that end the writer: so these run twice then.
    """
    try:
        try:
            writer.begin(remove)
            write()
        finally:
            writer.end()
    except BaseException:
        writer.end()
        raise


@dataclass(slots=True)
class Writer:
    """Writes the files for one target under its own number, with the permissions of the replaced file."""

    target: Path
    tidy: Callable[[], None] = lambda: None
    """Removes the other files that the writer leaves if it ends early; it may be called twice."""
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    mode: int | None = None
    """The permissions of the file that is replaced; None for a new file."""
    _paths: list[Path] = field(default_factory=list)
    """The files that were created, and perhaps one that could not be."""
    _files: list[int] = field(default_factory=list)
    """The descriptors of these files; they stay open and locked. A file that was closed has `_CLOSED`."""
    _forgotten: set[Path] = field(default_factory=set)
    """Names that are no longer this writer's."""
    _others: list[int] = field(default_factory=list)
    """Descriptors of the folder and of a dead writer's file."""

    @property
    def marker(self) -> Path:
        """The name of the unfinished file; a later writer recognises a dead writer by it."""
        return self.target.with_name(f".{self.number}.unfinished")

    def begin(self, remove: Remove) -> None:
        """Remove what dead writers left in the folder."""
        if self.target.exists():
            self.mode = stat.S_IMODE(self.target.stat().st_mode) & 0o777
        with suppress(OSError):  # the folder may not be listed, or the system is Windows
            open_into(self._others, self.target.parent, os.O_RDONLY)
        self.alone(lambda is_alone: self._remove_dead(remove) if is_alone else None)

    def end(self) -> None:
        """Remove the unfinished files, and close what is open; what is done already is not done again."""
        try:
            self.tidy()
        finally:
            for path, descriptor in zip(self._paths, self._files, strict=False):
                if path not in self._forgotten and _is_name_of(path, descriptor):
                    path.unlink(missing_ok=True)
            close_all(self._files)
            close_all(self._others)

    def alone(self, act: Callable[[bool], T]) -> T:
        """Let one process at a time change the names in the folder; `act` is told whether there is a lock."""
        if not self._others:
            return act(False)
        try:
            return act(lock(self._others[0], SECONDS))
        finally:
            unlock(self._others[0])

    def create(self, path: Path) -> Path:
        """Create an empty file, and lock it before another writer can take its writer for dead."""
        return self.alone(lambda _: self.create_alone(path))

    def create_alone(self, path: Path) -> Path:
        """Create a file while the folder is locked; at no time may more users read it than the old file."""
        del self._paths[len(self._files) :]
        self._paths.append(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        open_into(self._files, path, flags, 0o666 if self.mode is None else self.mode & 0o600)
        lock(self._files[-1])
        if self.mode is not None:
            with suppress(PermissionError):  # a file system without permissions
                os.chmod(self._files[-1] if os.chmod in os.supports_fd else path, self.mode)
        return path

    def has(self, path: Path) -> bool:
        """Return whether the file was created."""
        return path in self._paths[: len(self._files)]

    def write(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Fill a created file; when this returns, the contents are on the disk."""
        index = self._paths.index(path)
        with open(self._files[index], "wb", closefd=False) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if not HAS_LOCKS:  # such a system renames no open file
            descriptor, self._files[index] = self._files[index], _CLOSED
            os.close(descriptor)

    def forget(self, path: Path) -> None:
        """Remove a file that has got its name, while the folder is locked: another may take the old name."""
        path.unlink(missing_ok=True)
        self._forgotten.add(path)

    def _remove_dead(self, remove: Remove) -> None:
        """Remove unfinished files that no process has locked, and the other files that their writers left."""
        folder = self.target.parent
        for path in [*folder.iterdir()]:
            match = _UNFINISHED.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_file():
                continue
            with suppress(OSError):  # the file is gone meanwhile, or belongs to another user
                open_into(self._others, path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                try:
                    if lock(self._others[-1]):
                        remove(match[1], folder)
                        path.unlink(missing_ok=True)
                finally:
                    close_last(self._others)


def _is_name_of(path: Path, descriptor: int) -> bool:
    """Return whether a name is still that of the file that was created under it."""
    try:
        return descriptor == _CLOSED or os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:  # the name is gone
        return False


def give_name(writer: Writer, unfinished: Path, argument: PathArgument, *, overwrite: bool) -> None:
    """Give the finished file its name, unless it is taken, in one step: no other writer can come between."""
    if overwrite:
        unfinished.replace(writer.target)
        return
    try:
        _take(writer, unfinished)
    except FileExistsError:
        raise taken_error(writer.target, argument) from None


def _take(writer: Writer, unfinished: Path) -> None:
    try:
        os.link(unfinished, writer.target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        writer.create_alone(writer.target)  # takes the name; for a moment the file is empty
        unfinished.replace(writer.target)


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
