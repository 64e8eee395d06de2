"""Files that are whole or not there, and that replace another file only if told to.

A file is written under the name `.<32 hex digits>.unfinished`, which the writer keeps locked. A later writer in
the folder removes such files that nobody has locked: a process left them that was killed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from sdpa_xp_export._files.locks import HAS_LOCKS, lock, locked
from sdpa_xp_export._files.paths import PathArgument, free_target, reworded, taken_error

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The errors by which file systems without hard links, such as FAT, refuse one."""

_UNFINISHED = re.compile(r"\.([0-9a-f]{32})(?:\.\w+)?\.unfinished")

Remove = Callable[[str, Path], None]
"""Removes the other files that the dead writer of that number left in a folder."""


def publish(data: bytes, path: Path, argument: PathArgument, *, overwrite: bool = False) -> Path:
    """Write `data` to `path`, which then holds all of it or what it held before; return the real path."""
    with reworded(argument, path):
        target = free_target(path, argument, overwrite=overwrite)
        with writing(target) as writer:
            unfinished = writer.create(writer.marker)
            writer.write(unfinished, lambda file: file.write(data))
            give_name(unfinished, target, argument, overwrite=overwrite)
    return target


@dataclass(slots=True)
class Writer:
    """Writes the files for one target under its own number, with the permissions of the replaced file."""

    target: Path
    mode: int | None
    """The permissions of the file that is replaced; None for a new file."""
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    files: dict[Path, BinaryIO] = field(default_factory=dict)
    """The files that were created; they stay open and locked."""

    @property
    def marker(self) -> Path:
        """The name of the unfinished file; a later writer recognises a dead writer by it."""
        return self.target.with_name(f".{self.number}.unfinished")

    def create(self, path: Path) -> Path:
        """Create an empty file, and lock it before another writer can take its writer for dead."""
        with locked(self.target.parent):
            return self.create_alone(path)

    def create_alone(self, path: Path) -> Path:
        """Create a file while the folder is locked; at no time may more users read it than the old file."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags, 0o666 if self.mode is None else self.mode & 0o600)
        self.files[path] = os.fdopen(descriptor, "wb")
        lock(descriptor)
        if self.mode is not None:
            with suppress(PermissionError):  # a file system without permissions
                os.chmod(descriptor if os.chmod in os.supports_fd else path, self.mode)
        return path

    def write(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Fill a created file; when this returns, the contents are on the disk."""
        file = self.files[path]
        write(file)
        file.flush()
        os.fsync(file.fileno())
        if not HAS_LOCKS:  # such a system renames no open file
            file.close()

    def forget(self, path: Path) -> None:
        """Remove a file that has got its name, while the folder is locked: another may take the old name."""
        path.unlink(missing_ok=True)
        self.files.pop(path).close()


@contextmanager
def writing(target: Path, remove: Remove = lambda _number, _folder: None) -> Iterator[Writer]:
    """Remove what dead writers left in the folder, yield a writer, and remove its unfinished files."""
    mode = stat.S_IMODE(target.stat().st_mode) & 0o777 if target.exists() else None
    writer = Writer(target, mode)
    with locked(target.parent) as alone:
        if alone:
            _remove_dead(target.parent, remove)
    try:
        yield writer
    finally:
        for path, file in writer.files.items():
            if _UNFINISHED.fullmatch(path.name):
                path.unlink(missing_ok=True)
            file.close()


def _remove_dead(folder: Path, remove: Remove) -> None:
    """Remove unfinished files that no process has locked, and the other files that their writers left."""
    for path in [*folder.iterdir()]:
        match = _UNFINISHED.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_file():
            continue
        with suppress(OSError):  # the file is gone meanwhile, or belongs to another user
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            try:
                if lock(descriptor):
                    remove(match[1], folder)
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def give_name(unfinished: Path, target: Path, argument: PathArgument, *, overwrite: bool) -> None:
    """Give the finished file its name, unless it is taken, in one step: no other writer can come between."""
    if overwrite:
        unfinished.replace(target)
        return
    try:
        _take(unfinished, target)
    except FileExistsError:
        raise taken_error(target, argument) from None


def _take(unfinished: Path, target: Path) -> None:
    try:
        os.link(unfinished, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        target.touch(exist_ok=False)  # takes the name; for a moment the file is empty
        try:
            unfinished.replace(target)
        except BaseException:
            target.unlink()
            raise
