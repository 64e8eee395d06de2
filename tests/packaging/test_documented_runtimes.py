"""Each runtime that a page names is one that the exporter accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("onnx")

from internals import Runtime

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = re.compile(r"""["'](onnxruntime>=\d[^"'{]*)["']""")
NAMED = sorted({text for page in PAGES for text in WRITTEN.findall(page.read_text())})


def test_pages_name_runtimes() -> None:
    assert {"onnxruntime>=1.28;cpu", "onnxruntime>=1.28;cuda"} <= {*NAMED}


@pytest.mark.parametrize("text", NAMED)
def test_it_is_accepted(text: str) -> None:
    assert str(Runtime.parse("a page", text)) == text
