"""Each example runs, and checks its own numbers; those that are for any library run on three."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_NUMPY = ["unbatched_masks"]
OF_ANY = ["causal_module", "departments", "large_negative", "one_query"]
ELSEWHERE = ["minilm"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_is_run() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(OF_NUMPY + OF_ANY + ELSEWHERE)


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
@pytest.mark.parametrize("name", OF_ANY)
def test_on_any_library(name: str, module: str) -> None:
    load(name).main(importlib.import_module(module))


@pytest.mark.parametrize("name", OF_NUMPY)
def test_on_numpy(name: str) -> None:
    load(name).main()


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    load("large_negative").memory(1_000)
    assert "1,000 tokens: scores 4 MB" in capsys.readouterr().out


def test_picture_of_the_hull(tmp_path: Path) -> None:
    load("unbatched_masks").main(str(tmp_path / "hull.png"))
    assert (tmp_path / "hull.png").stat().st_size > 1000


def test_hull() -> None:
    """The corners of a square, whatever lies within or on its edges."""
    example = load("unbatched_masks")
    points = np.asarray([[0, 0], [1, 1], [0.5, 0.5], [1, 0], [0.5, 0], [0, 1]], float)
    assert sorted(map(tuple, example.hull(points))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert example.inside(np.asarray([0.9, 0.1]), example.hull(points))
    assert not example.inside(np.asarray([1.1, 0.5]), example.hull(points))
