"""What a wrong call says: the texts that are recorded, and the law that all of them keep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from libraries import Library, installed
from refusals.transcript import Answer, Ended, answers, files, needs

CLASSES = (*(TypeError, ValueError, OverflowError, AttributeError, LookupError, OSError, ImportError), Warning)
"""What a user of Python expects: an `except` for one of them is no `except Exception`."""
MISSING = re.compile(r" has no (function )?`\w+`")
"""A message without parts, of a name that a module or a message of protobuf would have."""
OF_OPERATORS = "jets"
"""The transcript of operators and array functions, whose errors name no function, as Python's own do."""
LONGEST = 800
"""Characters of a message, whatever came."""


def text_of(parts: list[Answer | Ended | str]) -> str:
    return "".join(part if isinstance(part, str) else f"{part}\n" for part in parts)


def as_numpy_spells_it(text: str) -> str:
    """Shapes and dtypes in a message, whichever library they are of."""
    text = re.sub(
        r"torch\.Size\(\[([\d, ]*)\]\)", lambda match: str(tuple(map(int, match[1].split(", ")))), text
    )
    return re.sub(r"\b(array_api_strict|mlx\.core|torch)\.(?=(bool|int|float)\d*\b)", "", text)


def assert_lawful(answer: Answer) -> None:
    """A message is one line, `function: rule; got name=value. hint`, that shows what came."""
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
    assert message.got, answer
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
        if isinstance(part, Answer) and path.stem != OF_OPERATORS:
            assert_lawful(part)
        if isinstance(part, Ended):
            assert_lawful_command(part)


@pytest.mark.parametrize("path", files("each_library"), ids=lambda path: path.stem)
def test_each_library_says_the_same(
    path: Path,
    library: Library,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`array` makes an array of the library; the texts are those that NumPy's calls give."""
    monkeypatch.chdir(tmp_path)
    with library.guard():
        text = as_numpy_spells_it(text_of([*answers(path, array=library.put, library=library)]))
    if library.name == "numpy" and request.config.getoption("--record"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", ["attention", "biases", "functions", "masks"])
def test_attention_state_says_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each wrong call of `scaled_dot_product_attention`, under its own name."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"{name}.txt"
    recorded = Path(__file__).with_name(path.name).read_text()
    path.write_text(re.sub(r"\bscaled_dot_product_attention(?=\(|: )", "attention_state", recorded))
    assert text_of([*answers(path)]) == path.read_text()
