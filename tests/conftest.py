"""`--backends=numpy,torch` chooses the array libraries; one that is asked for by name must run."""

from __future__ import annotations

import importlib.util

import hypothesis
import numpy as np
import pytest
from libraries import DEFAULT, LIBRARIES, Library

from sdpa_xp._tiles.plan import TileSize


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backends",
        help=f"comma-separated, of {', '.join(LIBRARIES)}; default: those installed of {', '.join(DEFAULT)}",
    )
    parser.addoption("--runtimes", help="comma-separated releases of onnxruntime, which must be installed")


def pytest_configure(config: pytest.Config) -> None:
    """JAX compiles each operation for each shape, so it gets fewer random calls."""
    slow = (config.getoption("--backends") or "").startswith("jax")
    hypothesis.settings.register_profile(
        "sdpa_xp",
        max_examples=3 if slow else 15,
        deadline=None,
        derandomize=True,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("sdpa_xp")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "library" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--backends")
        names = asked.split(",") if asked else [name for name in DEFAULT if _installed(name)]
        metafunc.parametrize("library", names, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a run for other libraries than NumPy, only the tests that ask for a library are part."""
    asked = config.getoption("--backends")
    if asked and "numpy" not in asked.split(","):
        alike = [item for item in items if "library" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=alike)
        items[:] = [item for item in items if item not in alike]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(LIBRARIES[name][0]) is not None


BOUNDED = ("numpy", "numpy-readonly", "torch")
"""The libraries that have a softmax without a maximum."""


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Library:
    """One of the array libraries; the test runs once for each."""
    if request.param not in LIBRARIES:
        raise pytest.UsageError(f"--backends: {request.param} is none of {', '.join(LIBRARIES)}")
    return LIBRARIES[request.param][1]()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20170612)


@pytest.fixture(params=["maximum", "no maximum"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 6, so that small arrays are cut into several, the last of them smaller.

    Once more with scores that are looked at for a bound however few they are, where that is done at all.
    """
    if request.param == "no maximum":
        if "library" in request.fixturenames and request.getfixturevalue("library").name not in BOUNDED:
            pytest.skip("scores are bounded where arrays are written to")
        monkeypatch.setattr("sdpa_xp._tiles.plan.LEAST_SIDE_FOR_BOUND", 0)
    _cut_small(monkeypatch)


@pytest.fixture(params=["maximum", "no maximum"])
def tiles(library: Library, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles; on JAX, which compiles each shape anew, one of all pairs."""
    if request.param == "no maximum":
        if library.name not in BOUNDED:
            pytest.skip("scores are bounded where arrays are written to")
        monkeypatch.setattr("sdpa_xp._tiles.plan.LEAST_SIDE_FOR_BOUND", 0)
    if not library.name.startswith("jax"):
        _cut_small(monkeypatch)


def _cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {
        "ONE_CORE": TileSize(4, 6, 24),
        "ALL_CORES": TileSize(4, 6, 24),
        "DEVICE": TileSize(4, 6, 2**22),
    }.items():
        monkeypatch.setattr(f"sdpa_xp._tiles.plan.{name}", size)
