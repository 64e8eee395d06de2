"""Files that are whole or not there, and take no other file's name unless told to."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sdpa_xp.checks import message
from sdpa_xp_export.oserrors import reason, worded

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""How file systems without hard links, as FAT, refuse one."""


class Asked(NamedTuple):
    """By which argument of which function a path came, as messages say it."""

    function: str
    argument: str

    def message(self, rule: str, path: str | Path, hint: str = "") -> str:
        """What must hold for `path`."""
        return message(self.function, f"`{self.argument}` {rule}", {self.argument: path}, hint)


def publish(data: bytes, path: Path, asked: Asked, *, overwrite: bool = False) -> Path:
    """Write `data` to `path`, which then holds all of it or what it held before; returns where links end."""
    with in_words_of(asked, path):
        target = free_target(path, asked, overwrite=overwrite)
        unfinished = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
        try:
            write(unfinished, lambda file: file.write(data))
            give_name(unfinished, target, asked, overwrite=overwrite)
        finally:
            unfinished.unlink(missing_ok=True)
    return target


@contextmanager
def in_words_of(asked: Asked, path: str | Path) -> Iterator[None]:
    """An error of the system names the path that the user gave, and not one that is ours."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it is in our words
            raise
        raise worded(error, asked.message(f"must be writable ({reason(error)})", path)) from error


def free_target(path: str | Path, asked: Asked, *, overwrite: bool) -> Path:
    """The file to write: where links end, so that a link stays one."""
    target = Path(os.path.realpath(path))
    if target.is_symlink() or (target.exists() and not target.is_file()):  # still a link: they run in a circle
        raise FileExistsError(asked.message("must be a file", target))
    if not target.parent.is_dir():
        rule = f"the folder of `{asked.argument}` must exist"
        raise FileNotFoundError(message(asked.function, rule, {asked.argument: target}))
    if target.exists() and not overwrite:
        raise _taken(target, asked)
    return target


def write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """A new file, on the disk when this returns: it must not get its name before its contents."""
    with path.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def give_name(unfinished: Path, target: Path, asked: Asked, *, overwrite: bool) -> None:
    """Give the finished file its name, unless the name is taken: one step, so that no writer is overrun."""
    if overwrite:
        unfinished.replace(target)
        return
    try:
        _take(unfinished, target)
    except FileExistsError:
        raise _taken(target, asked) from None


def _take(unfinished: Path, target: Path) -> None:
    try:
        os.link(unfinished, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        target.touch(exist_ok=False)  # takes the name instead, which shows an empty file for a moment
        try:
            unfinished.replace(target)
        except BaseException:
            target.unlink()
            raise


def _taken(target: Path, asked: Asked) -> FileExistsError:
    hint = "Pass overwrite=True (--force) to replace it."
    return FileExistsError(
        message(asked.function, f"`{asked.argument}` must not exist", {asked.argument: target}, hint)
    )
