"""The path that a caller gave for a file: checked, named in messages, and followed through links."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sdpa_xp.checks import message
from sdpa_xp_export._files.oserrors import reason, worded


class Asked(NamedTuple):
    """By which argument of which function a path came, as messages say it."""

    function: str
    argument: str

    def message(self, rule: str, path: object, hint: str = "") -> str:
        """What must hold for `path`."""
        return message(self.function, f"`{self.argument}` {rule}", {self.argument: path}, hint)

    def path(self, given: object) -> Path:
        """Check that `given` is a path that the system can name."""
        if not isinstance(given, str | os.PathLike):
            raise TypeError(self.message("must be a path", type(given).__name__))
        path = Path(given)
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError as error:
            rule = "must be of characters that the file system can name"
            raise ValueError(self.message(rule, ascii(str(path)))) from error
        if b"\0" in encoded:
            raise ValueError(self.message("must hold no NUL", ascii(str(path))))
        return path


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
    """Return the file to write, with links followed, so that a link stays a link.

    A link to a file that is not there leads out of its folder only with `overwrite`: whoever may write to the
    folder could else have a file made wherever the caller may write.
    """
    given = asked.path(path)
    target = Path(os.path.realpath(given))
    if target.is_symlink() or (target.exists() and not target.is_file()):  # still a link: they run in a circle
        raise FileExistsError(asked.message("must be a file", target))
    if not target.parent.is_dir():
        rule = f"the folder of `{asked.argument}` must exist"
        raise FileNotFoundError(message(asked.function, rule, {asked.argument: target}))
    if target.exists() and not overwrite:
        raise taken(target, asked)
    folder = Path(os.path.realpath(given.parent))
    if not overwrite and folder != target.parent and folder not in target.parents:
        rule, hint = "must not be a link out of its folder", "Pass overwrite=True (--force) to follow it."
        raise FileExistsError(asked.message(rule, given, hint))
    return target


def taken(target: Path, asked: Asked) -> FileExistsError:
    """Return the error for a file that is in the way."""
    hint = "Pass overwrite=True (--force) to replace it."
    return FileExistsError(asked.message("must not exist", target, hint))
