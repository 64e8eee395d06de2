"""Transcripts of wrong calls: each call as a user writes it, and the error or the warning that answers it.

    >>> scaled_dot_product_attention(q, k, v, scale="1")
    ArgumentTypeError: scaled_dot_product_attention: `scale` must be a real number; got scale='1'.

    $ sdpa-xp export --opset new
    sdpa-xp: export: `--opset` must be an integer; got --opset='new'.

A line without an answer prepares those that follow. `pytest tests/refusals --record` writes all answers anew;
whoever changes a message reads them in the diff.
"""

from __future__ import annotations

import io
import linecache
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from sdpa_xp.errors import Message

FIRST, NEXT, COMMAND = ">>> ", "... ", "$ "
HERE = Path(__file__).parent
_NOT_OF_THE_CALL = re.compile(
    r"(?<= at )0x[0-9a-f]+|(?<=where=)\w+-\d+(?=\.py:\d)|(?<=\.)[0-9a-f]{32}(?=\.data)"
)
"""What is another text in each run, or with each line that comes before it."""
_NODE = re.compile(r"\b((?:nonzero_)?(?:[A-Z][a-z]+)+)_\d+\b")
"""A value of a graph, whose number changes with each node before it."""


def without_chance(text: str) -> str:
    """The text without what is another one in each run, in each folder and in each graph."""
    text = _NOT_OF_THE_CALL.sub("...", text).replace(f"{Path.cwd()}/", ".../")
    return _NODE.sub(r"\1_...", text)


@dataclass(frozen=True)
class Answer:
    """What a call raised, or what it warned of."""

    call: str
    error: Exception
    is_warning: bool = False
    wrote: bool = False
    """Whether a file of the folder is another one than before."""

    @property
    def message(self) -> Message | None:
        """The message with its parts; None for an error of another library."""
        first = self.error.args[0] if self.error.args else None
        return first if isinstance(first, Message) else None

    def __str__(self) -> str:
        notes = [note for note in getattr(self.error, "__notes__", ()) if note.isprintable()]  # JAX's has lines
        return without_chance("\n".join([f"{type(self.error).__name__}: {self.error}", *notes]))


@dataclass(frozen=True)
class Ended:
    """How the command ended that was refused."""

    command: str
    code: int
    printed: str
    error: str
    """What went to the standard error."""
    wrote: bool

    def __str__(self) -> str:
        return without_chance(self.error.removesuffix("\n"))


def files(folder: str = ".") -> list[Path]:
    """The transcripts of a folder."""
    return sorted((HERE / folder).glob("*.txt"))


def needs(path: Path) -> list[str]:
    """The packages that a transcript needs besides NumPy: `# needs torch, jax` in its first line."""
    first = path.read_text().partition("\n")[0]
    return re.split(", *", first.removeprefix("# needs ")) if first.startswith("# needs ") else []


def answers(path: Path, **names: Any) -> Iterator[Answer | Ended | str]:
    """Make the calls of a transcript: its lines, and behind each call what it raised, warned of or printed.

    Args:
        path: The transcript.
        names: What the calls may use besides what the transcript itself imports.
    """
    names["__name__"] = path.stem  # as the code of a user
    calls = re.split(r"^(?=>>> |\$ )", path.read_text(), flags=re.MULTILINE)
    yield calls[0]
    number = calls[0].count("\n")
    for call in calls[1:]:
        lines = call.splitlines(keepends=True)
        source = [line for line in lines if line.startswith((FIRST, NEXT, COMMAND))]
        rest = lines[len(source) :]
        yield "".join(source)
        if call.startswith(COMMAND):
            yield from _ended(source[0].removeprefix(COMMAND))
        else:
            code = "".join(line[len(FIRST) :] for line in source)
            yield from _answer(code, f"{path.stem}-{number}.py", names)
        number += len(lines)
        yield "".join(line for line in rest if not line.strip() or line.startswith("#"))


def _answer(code: str, place: str, names: dict[str, Any]) -> Iterator[Answer]:
    linecache.cache[place] = len(code), None, code.splitlines(keepends=True), place  # some messages quote it
    before = _folder()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec(compile(code, place, "exec"), names)
        except Exception as error:
            yield Answer(code, error, wrote=_folder() != before)
            return
    yield from (
        Answer(code, warning.message, is_warning=True)
        for warning in warned
        if isinstance(warning.message, Exception)
    )


def _ended(command: str) -> Iterator[Ended]:
    from sdpa_xp_export.cli import main  # with packages that other transcripts do not need

    before = _folder()
    with (
        mock.patch.object(sys, "argv", shlex.split(command)),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    if code:
        yield Ended(command, code, out.getvalue(), err.getvalue(), _folder() != before)


def _folder() -> list[tuple[Path, int]]:
    """The files of the folder, each with the time when it was written."""
    return sorted((path, path.lstat().st_mtime_ns) for path in Path().rglob("*"))
