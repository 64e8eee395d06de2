"""What values show, as a user reads it, in shown.txt: their repr, and the words of their HTML."""

from __future__ import annotations

import doctest
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from internals import VARIABLE


def show(value: Any) -> None:
    """Print each row of a table, and what else has words, on a line of its own."""
    for part in ElementTree.fromstring(value._repr_html_()).iter():
        if part.tag == "tr":
            print(" | ".join(filter(None, (text.strip() for text in part.itertext()))))
        elif (part.text or "").strip() and part.tag not in ("th", "td"):
            print(f"{part.text} {part.tail or ''}".strip())


def test_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    results = doctest.testfile("shown.txt", globs={"show": show})
    assert (results.failed, results.attempted > 40) == (0, True)
