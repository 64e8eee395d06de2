"""The exporter without its extra says what to install."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest

import sdpa_xp_export

FILE = str(Path(str(sdpa_xp_export.__file__)))


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_onnx(name: str, *rest: Any) -> Any:
        return None if name == "onnx" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_onnx)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sdpa_xp\[export\]'") as refused:
        runpy.run_path(FILE)
    assert refused.value.name == "onnx"


def test_with_it_the_public_names_are_there() -> None:
    found = runpy.run_path(FILE)
    assert all(callable(found[name]) for name in found["__all__"])
