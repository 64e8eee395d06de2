"""The README's Python examples run, on the libraries that its first comment names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
def test_examples(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as a reader types them; only the import changes."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(BLOCKS).replace("import numpy as xp", f"import {module} as xp")
    code = code.replace("dtype=bool", "dtype=xp.bool") if module == "torch" else code
    exec(compile(code, str(README), "exec"), {"__name__": "__main__"})
    assert (tmp_path / "attention.onnx").exists()
