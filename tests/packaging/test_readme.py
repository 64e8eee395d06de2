"""The README's Python examples run, on the libraries that its first comment names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sdpa_xp

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(BLOCKS) == 11


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
def test_examples(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as a reader types them; only the import changes."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(BLOCKS).replace("import numpy as xp", f"import {module} as xp")
    code = code.replace("dtype=bool", "dtype=xp.bool") if module == "torch" else code
    exec(compile(code, str(README), "exec"), {"__name__": "__main__"})
    assert (tmp_path / "attention.onnx").exists()


def test_links_lead_to_files() -> None:
    """Each row of the feature table has a test that exists."""
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("http") and not (README.parent / link).exists()] == []


@pytest.mark.parametrize("name", [name for name in sdpa_xp.__all__ if name[0] not in "_A"])
def test_every_public_name_is_mentioned(name: str) -> None:
    assert f"{name}`" in TEXT or f"{name}(" in TEXT or f"`{name}." in TEXT
