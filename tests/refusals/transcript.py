"""Transcripts of wrong calls: each call as a user writes it, and the error or the warning that answers it.

    >>> scaled_dot_product_attention(q, k, v, scale="1")
    ArgumentTypeError: scaled_dot_product_attention: `scale` must be a real number; got scale='1'.

A line without an answer prepares those that follow. `pytest tests/refusals --record` writes all answers anew;
whoever changes a message reads them in the diff.
"""

from __future__ import annotations

import linecache
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_xp.errors import Message

FIRST, NEXT = ">>> ", "... "
HERE = Path(__file__).parent
_NOT_OF_THE_CALL = re.compile(r"(?<= at )0x[0-9a-f]+")
"""What is another text in each run."""


@dataclass(frozen=True)
class Answer:
    """What a call raised, or what it warned of."""

    call: str
    error: Exception
    is_warning: bool = False

    @property
    def message(self) -> Message | None:
        """The message with its parts; None for an error of another library."""
        first = self.error.args[0] if self.error.args else None
        return first if isinstance(first, Message) else None

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {_NOT_OF_THE_CALL.sub('...', str(self.error))}"


def files(folder: str = ".") -> list[Path]:
    """The transcripts of a folder."""
    return sorted((HERE / folder).glob("*.txt"))


def needs(path: Path) -> list[str]:
    """The packages that a transcript needs besides NumPy: `# needs torch, jax` in its first line."""
    first = path.read_text().partition("\n")[0]
    return re.split(", *", first.removeprefix("# needs ")) if first.startswith("# needs ") else []


def answers(path: Path, **names: Any) -> Iterator[Answer | str]:
    """Make the calls of a transcript: its lines, and behind each call what it raised or warned of.

    Args:
        path: The transcript.
        names: What the calls may use besides what the transcript itself imports.
    """
    names["__name__"] = path.stem  # as the code of a user
    calls = re.split(r"^(?=>>> )", path.read_text(), flags=re.MULTILINE)
    yield calls[0]
    number = calls[0].count("\n")
    for call in calls[1:]:
        lines = call.splitlines(keepends=True)
        source = [line for line in lines if line.startswith((FIRST, NEXT))]
        rest = lines[len(source) :]
        yield "".join(source)
        code = "".join(line[len(FIRST) :] for line in source)
        yield from _answer(code, f"{path.stem}-{number}.py", names)
        number += len(lines)
        yield "".join(line for line in rest if not line.strip() or line.startswith("#"))


def _answer(code: str, place: str, names: dict[str, Any]) -> Iterator[Answer]:
    linecache.cache[place] = len(code), None, code.splitlines(keepends=True), place  # some messages quote it
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec(compile(code, place, "exec"), names)
        except Exception as error:
            yield Answer(code, error)
            return
    yield from (
        Answer(code, warning.message, is_warning=True)
        for warning in warned
        if isinstance(warning.message, Exception)
    )
