"""The path that a caller passed for a file: checked, followed through links, named in errors, and written.

A file is written as `.<32 hex digits>.unfinished` beside its place, and gets its name when it is on the disk.
If the process is killed before, this file stays, and nothing else has changed.
"""

# Why not onnx_ir: an `onnx_ir.save` (1.1.0) that is killed may leave an old model with new data.

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The errors by which file systems without hard links, such as FAT, refuse one."""


class PathArgument(NamedTuple):
    """The argument of the function that a path was passed as, for messages."""

    function: str
    argument: str

    def message(self, rule: str, path: object, hint: str = "") -> Message:
        """Return the message that says what must hold for `path`."""
        return Message(self.function, f"`{self.argument}` {rule}", {self.argument: path}, hint)

    def checked(self, path: object) -> Path:
        """Check that `path` is a path that the system can name."""
        try:
            name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
        except TypeError as error:  # an object whose `__fspath__` returns neither str nor bytes
            raise ArgumentTypeError(*self.message("must be a path", type(path).__name__).parts) from error
        if not isinstance(name, str):
            rule = "must be a path of text" + (", not of bytes" if isinstance(name, bytes) else "")
            raise ArgumentTypeError(*self.message(rule, type(name).__name__).parts)
        path = Path(name)
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError as error:
            rule = "must have only characters that the file system can name"
            raise ArgumentValueError(*self.message(rule, ascii(str(path))).parts) from error
        if b"\0" in encoded:
            raise ArgumentValueError(*self.message("must not contain a NUL character", ascii(str(path))).parts)
        return path


@contextmanager
def reworded(argument: PathArgument, path: str | os.PathLike[str] | None, hint: str = "") -> Iterator[None]:
    """Reword errors of the system: they then name the path that the user passed, and no temporary one.

    Without a path, that is the folder for temporary files.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # this package raised it
            raise
        path = tempfile.tempdir if path is None else path
        raise with_text(error, argument.message(f"must be writable ({reason(error)})", path, hint)) from error


def temporary(function: str = "verify") -> AbstractContextManager[None]:
    """Reword errors of the system about temporary files, which are no fault of a model."""
    hint = "It is the folder for temporary files: free space there, lift the limit, or name another folder."
    return reworded(PathArgument(function, "TMPDIR"), None, hint)


def absence_hint(path: str | os.PathLike[str]) -> str:
    """Return which file is not there, if `path` leads to nothing."""
    file = os.path.realpath(path)
    return "" if os.path.exists(file) else f"There is no file {file}."


def free_target(path: str | os.PathLike[str], argument: PathArgument, *, overwrite: bool) -> Path:
    """Return the file to write, with links followed, so that a link stays a link.

    A link to a file that is not there must not lead into another folder. Otherwise whoever may write to the
    folder could have a file made wherever the caller may write.
    """
    checked = argument.checked(path)
    target = Path(os.path.realpath(checked))
    # A pipe, as /dev/stdout, has no name to follow; a real path that is still a link runs in a circle.
    if target.is_symlink() or (checked.exists() and not checked.is_file()):
        raise FileExistsError(argument.message("must be a file", checked))
    if not target.parent.is_dir():
        rule = f"the folder of `{argument.argument}` must exist"
        raise FileNotFoundError(Message(argument.function, rule, {argument.argument: target}))
    if target.exists() and not overwrite:
        raise taken_error(target, argument)
    if not target.exists() and Path(os.path.realpath(checked.parent)) != target.parent:
        rule, hint = "must not be a link to nothing in another folder", f"Pass {target} itself."
        raise FileExistsError(argument.message(rule, checked, hint))
    return target


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
    overwrite: bool,
    before: Callable[[], object] = lambda: None,
    tidy: Callable[[], object] = lambda: None,
) -> None:
    """Let `target` hold what `fill` writes, or what it held before; `before` it is replaced, and to `tidy` up.

    An interrupt may come at any line, also while this is tidied up: so it is done twice then.
    """
    unfinished = target.with_name(f".{uuid.uuid4().hex}.unfinished")

    def tidy_all() -> None:
        unfinished.unlink(missing_ok=True)
        tidy()

    try:
        try:
            write_new(unfinished, fill, like=target)
            before()
            _give_name(unfinished, target, argument, overwrite=overwrite)
        finally:
            tidy_all()
    except BaseException:
        tidy_all()
        raise


def write_new(path: Path, fill: Callable[[BinaryIO], object], *, like: Path) -> None:
    """Write what `fill` writes to a new file, until it is on the disk.

    The file gets the permissions of `like` if that exists; at no time may more users read it.
    """
    is_like = like.exists()
    # `open` calls the system and keeps the descriptor in C, where no interrupt can come between.
    with open(path, "xb", opener=partial(os.open, mode=0o600 if is_like else 0o666)) as file:
        if is_like:
            with suppress(PermissionError):  # a file system without permissions
                shutil.copymode(like, path)
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def _give_name(unfinished: Path, target: Path, argument: PathArgument, *, overwrite: bool) -> None:
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


def check_is_no_input(output: PathArgument, path: Path, inputs: Mapping[Path, str]) -> None:
    """Refuse to write over a file that is read, under whatever name: a link, a hard link, another spelling.

    Args:
        output: The argument that the path was passed as.
        path: The file to write.
        inputs: What each file is, for the message.
    """
    for read, what in inputs.items():
        if is_same_file(path, read):
            raise FileExistsError(output.message(f"must not be {what}", path, f"It would replace {read}."))


def is_same_file(one: Path, other: Path) -> bool:
    """Return whether two paths name one file."""
    try:
        return os.path.realpath(one) == os.path.realpath(other) or os.path.samefile(one, other)
    except (OSError, ValueError):  # one of them is not there
        return False


def taken_error(target: Path, argument: PathArgument) -> FileExistsError:
    """Return the error for a file that is in the way."""
    hint = "Pass `overwrite=True` to replace it."
    return FileExistsError(argument.message("must not exist", target, hint))


def with_text(error: OSError, text: str) -> OSError:
    """Return an error of the class and the number of `error` that says `text` alone."""
    reworded = type(error)(text)
    reworded.errno = error.errno
    return reworded


def reason(error: OSError) -> str:
    """Return what went wrong, without the path, which may be one that the user never named."""
    return error.strerror or str(error)
