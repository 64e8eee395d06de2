"""Each message that a user can see is matched by a test: some words of its rule stand in one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "sdpa_xp").rglob("*.py"), *(ROOT / "export" / "sdpa_xp_export").rglob("*.py")]
WORDS = 5
UNSEEN = ("`bias.table` must have a number of buckets that is an int",)
"""What the library refuses first."""


def texts(node: ast.expr) -> Iterator[str]:
    """The strings of an expression, with a gap for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.BinOp):
        yield from texts(node.left)
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)


def rules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What is assigned to `rule`, and the second argument of `message`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["rule"]:
            found = texts(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("message") and len(node.args) > 1:
            found = texts(node.args[1])
        else:
            continue
        for text in found:
            yield node.lineno, text


def plain(text: str) -> str:
    """Without what a regular expression escapes, and without quotes."""
    return re.sub(r"[\\`'\"]", "", text)


def runs(text: str) -> list[str]:
    """Some words that follow each other; all of a text that is short."""
    parts = [part.split() for part in plain(text).split("{}")]
    most = min(WORDS, max(map(len, parts)))
    return [" ".join(words[at : at + most]) for words in parts for at in range(len(words) - most + 1)]


@pytest.fixture(scope="module")
def tested() -> str:
    return plain(
        "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    )


def test_each_message_has_a_test(tested: str) -> None:
    missing = []
    for path in FILES:
        for line, text in rules(ast.parse(path.read_text())):
            if text not in UNSEEN and not any(run in tested for run in runs(text)):
                missing.append(f"{path.relative_to(ROOT)}:{line}: {text}")
    assert not missing, "no test has words of\n" + "\n".join(missing)
