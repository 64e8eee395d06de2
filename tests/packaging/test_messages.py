"""Each message that a user can see is recorded, or matched by a test: words of its rule stand there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "sdpa_xp").rglob("*.py"), *(ROOT / "export" / "sdpa_xp_export").rglob("*.py")]
UNSEEN = ("`bias.table` must have a number of buckets that is an int",)
"""What the library refuses first."""
MAKES = re.compile(r"(^|\W)(Argument(Type|Value)Error|Message|\w*message)$")


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


def rules(tree: ast.Module) -> Iterator[str]:
    """What is assigned to `rule`, and the second argument of an error with fields and of `message`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["rule"]:
            strings = texts(node.value)
        elif isinstance(node, ast.Call) and MAKES.search(ast.unparse(node.func)) and len(node.args) > 1:
            strings = texts(node.args[1])
        else:
            continue
        yield from strings


def plain(text: str) -> str:
    """Without what a regular expression escapes, and without quotes."""
    return re.sub(r"[\\`'\"]", "", text)


def runs(text: str, length: int) -> set[str]:
    """Words that follow each other, so many of them or all of a text that is short."""
    parts = [part.split() for part in plain(text).split("{}")]
    most = min(length, max(map(len, parts)))
    return {" ".join(words[start : start + most]) for words in parts for start in range(len(words) - most + 1)}


@pytest.fixture(scope="module")
def tested() -> str:
    tests = ROOT / "tests"
    files = [*tests.rglob("test_*.py"), *(tests / "refusals").rglob("*.txt")]
    return plain("\n".join(path.read_text() for path in files if path != Path(__file__)))


def test_each_message_has_a_test(tested: str) -> None:
    """Three words that no other rule has, or five."""
    paths = {text: path for path in FILES for text in rules(ast.parse(path.read_text())) if text not in UNSEEN}
    rules_with = Counter(run for text in paths for run in runs(text, 3))
    missing = [
        f"{path.relative_to(ROOT)}: {text}"
        for text, path in paths.items()
        if not any(run in tested for run in runs(text, 5))
        and not any(run in tested and rules_with[run] == 1 for run in runs(text, 3))
    ]
    assert not missing, "no test has words of\n" + "\n".join(missing)
