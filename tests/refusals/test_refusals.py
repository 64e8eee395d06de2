"""What a wrong call says: the texts that are recorded, and the law that all of them keep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from libraries import Library, installed
from refusals.transcript import Answer, Ended, answers, files, needs

CLASSES = (
    *(TypeError, ValueError, OverflowError, AttributeError, LookupError, OSError, ImportError),
    Warning,
)
"""What a user of Python expects: an `except` for one of them is no `except Exception`."""
MISSING = re.compile(r" has no (function )?`\w+`")
"""A message without parts, of a name that a module or a message of protobuf would have."""
LONGEST = 800
"""Characters of a message, whatever came."""


def text_of(parts: list[Answer | Ended | str]) -> str:
    return "".join(part if isinstance(part, str) else f"{part}\n" for part in parts)


def assert_lawful(answer: Answer) -> None:
    """A message is one line, `function: rule; got name=value. hint`, that names the argument or what came."""
    message = answer.message
    assert not answer.wrote, f"{answer} after a file was written"
    if isinstance(answer.error, AttributeError | TypeError) and MISSING.search(str(answer.error)):
        return
    assert message is not None, f"{answer.call}: an error of another library, {answer}"
    assert isinstance(answer.error, CLASSES), answer
    assert message.isprintable(), answer
    assert len(message) < LONGEST, answer
    assert message.startswith(f"{message.function}: "), answer
    assert message.count(f"{message.function}: ") == 1, answer
    assert message.endswith((".", "`")), answer
    assert message.argument or message.got, answer
    assert " at 0x" not in message, f"{answer} shows where an object lies in memory"


def assert_lawful_command(ended: Ended) -> None:
    """One line, exit code 2, nothing printed or written; it names flags, and no keyword of Python."""
    from command import KEYWORD  # with packages that other transcripts do not need

    assert (ended.code, ended.printed, ended.wrote) == (2, "", False), ended
    assert ended.error.startswith("sdpa-xp: "), ended
    assert ended.error.removesuffix("\n").isprintable(), ended
    assert len(ended.error) < LONGEST, ended
    assert not KEYWORD.search(ended.error), ended
    assert "overwrite" not in ended.error, ended


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_recorded(
    path: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, where calls may name files."""
    monkeypatch.chdir(tmp_path)
    for package in needs(path):
        if not installed(package):
            pytest.skip(f"{package} is not installed")
    parts = list(answers(path))
    if request.config.getoption("--record"):
        path.write_text(text_of(parts))
    assert text_of(parts) == path.read_text()
    for part in parts:
        if isinstance(part, Answer):
            assert_lawful(part)
        if isinstance(part, Ended):
            assert_lawful_command(part)


@pytest.mark.parametrize("path", files("each_library"), ids=lambda path: path.stem)
def test_each_library_says_the_same(path: Path, library: Library, request: pytest.FixtureRequest) -> None:
    """`array` makes an array of the library; the texts are those that NumPy's calls give."""
    with library.guard():
        parts = list(answers(path, array=library.put, library=library))
    if library.name == "numpy" and request.config.getoption("--record"):
        path.write_text(text_of(parts))
    assert text_of(parts) == path.read_text()
