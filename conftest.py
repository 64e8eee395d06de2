"""Which tests run. `--backends=numpy,torch` chooses the array libraries; what is asked for by name must run.

A test gets an array library from the fixture `library`, or names those that it needs by the marker `needs`.
Without `--backends`, tests of libraries that are not installed are skipped. `--fast` asks for NumPy, and for
torch if it is installed, and leaves out the tests that are marked `slow`.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from internals import cut_small, override, reference
from libraries import (
    CUPY_RULES,
    DEFAULT,
    EAGER_JAX,
    FAST,
    LIBRARIES,
    SETTINGS,
    THIN,
    WRITEABLE,
    Library,
    installed,
)

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # also for the processes that tests start

SMALL_CALL = 2**20
"""Bytes of a call whose reference is kept."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backends",
        help=f"comma-separated, of {', '.join(LIBRARIES)}; default: those installed of {', '.join(DEFAULT)}",
    )
    parser.addoption("--fast", action="store_true", help=f"{' and '.join(FAST)}, without slow tests")
    parser.addoption(
        "--thin",
        action="store_true",
        help="fewer cases: of the libraries in `THIN`, and of the tests that are marked `sampled`",
    )
    parser.addoption("--record", action="store_true", help="write the messages of tests/refusals anew")
    parser.addoption("--runtimes", help="comma-separated releases of onnxruntime, which must be installed")


def pytest_configure(config: pytest.Config) -> None:
    chosen = _chosen_libraries(config) or []
    if any(name in CUPY_RULES for name in chosen):
        if "cupy" in chosen:
            raise pytest.UsageError("--backends: cupy and its rules are one module, so each needs its own run")
        sys.path.insert(0, str(config.rootpath / "tests/standins"))
    for name in chosen:
        if name not in LIBRARIES:
            raise pytest.UsageError(f"--backends: {name} is none of {', '.join(LIBRARIES)}")
        if not installed(LIBRARIES[name][0]):
            raise pytest.UsageError(f"--backends: {name} needs {LIBRARIES[name][0]}, which is not installed")
    for profile, examples in {"many": 15, "few": 3}.items():
        hypothesis.settings.register_profile(
            profile,
            max_examples=examples,
            deadline=None,
            derandomize=True,
            suppress_health_check=[
                hypothesis.HealthCheck.function_scoped_fixture,
                hypothesis.HealthCheck.too_slow,
            ],
        )
    hypothesis.settings.load_profile("many")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """JAX compiles each operation for each shape, and Dask makes a graph of it: they get fewer random calls."""
    hypothesis.settings.load_profile("few" if _library(item).startswith(("jax", "dask")) else "many")


def _chosen_libraries(config: pytest.Config) -> list[str] | None:
    """The libraries that were asked for, or None for all that are installed."""
    names = config.getoption("--backends")
    if names:
        return list(names.split(","))
    return [name for name in FAST if installed(LIBRARIES[name][0])] if config.getoption("--fast") else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file whose mark names libraries that were not asked for: to import these takes seconds."""
    chosen = _chosen_libraries(config)
    if chosen is None or collection_path.suffix != ".py":
        return None
    mark = re.search(
        r"^pytestmark = \[?\s*pytest\.mark\.needs\((.*?)\)", collection_path.read_text(), re.MULTILINE
    )
    needed = {*re.findall(r"\w+", mark[1])} if mark else set()
    return True if needed and not _is_named(needed, chosen) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "library" in metafunc.fixturenames:
        chosen = _chosen_libraries(metafunc.config)
        names = [name for name in DEFAULT if installed(LIBRARIES[name][0])] if chosen is None else chosen
        metafunc.parametrize("library", names, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the libraries that were asked for, and skip what needs a package that is not there."""
    chosen, fast = _chosen_libraries(config), config.getoption("--fast")
    kept, left_out = [], []
    cases: Counter[tuple[str, str]] = Counter()
    for item in items:
        needed = {name for marker in item.iter_markers("needs") for name in marker.args}
        absent = sorted(name for name in needed if not installed(name))
        if not _is_asked(item, needed, chosen) or (fast and (absent or item.get_closest_marker("slow"))):
            left_out.append(item)
            continue
        name, function = _library(item), item.nodeid.partition("[")[0]
        cases[function, name] += 1
        if config.getoption("--thin") and _is_left_out(item, name, cases[function, name] - 1):
            left_out.append(item)
            continue
        kept.append(item)
        if absent:
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(absent)} is not installed"))
    # The longest run first, so that no process starts one when the others have nothing left.
    kept.sort(key=lambda item: item.get_closest_marker("slow") is None)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _library(item: pytest.Item) -> str:
    """The name of the library that a test gets, or none."""
    return (
        str(item.callspec.params.get("library", ""))
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else ""
    )


def _is_left_out(item: pytest.Item, library: str, number: int) -> bool:
    """Whether `--thin` leaves a case out, by its number among the cases of its function on a library."""
    groups = {None: (library,), "EAGER_JAX": EAGER_JAX, "THIN": THIN}
    marks = [mark for mark in item.iter_markers("sampled") if library in groups[mark.kwargs.get("on")]]
    counts = [mark.args[0] for mark in marks]
    if 0 in counts or 1 in counts:
        return 0 in counts
    return number % max([THIN.get(library, 1), *counts[:1]]) != 0


def _is_asked(item: pytest.Item, needed: set[str], chosen: list[str] | None) -> bool:
    """Whether a test is part of a run for some libraries.

    A test without the fixture `library` is part of the runs for the libraries that it names, or of NumPy's. It
    sets what it asks about itself, so it is no part of the runs for settings.
    """
    left_out = {name for marker in item.iter_markers("leaves_out") for name in marker.args}
    if "library" in getattr(item, "fixturenames", ()):
        return _library(item) not in left_out
    if chosen is None:
        return True
    return _is_named(needed, chosen)


def _is_named(needed: set[str], chosen: list[str]) -> bool:
    """Whether one of the libraries that a test or a file names was asked for; NumPy's is what names none."""
    named = needed & {module for module, _ in LIBRARIES.values()} or {"numpy"}
    return bool(named & {LIBRARIES[name][0] for name in chosen if name not in SETTINGS})


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Library:
    """One of the array libraries; the test runs once for each."""
    return LIBRARIES[request.param][1]()


@pytest.fixture(autouse=True, scope="session")
def _the_reference_is_computed_once() -> Iterator[None]:
    """Libraries and graphs are compared with the reference of the same calls, which is a loop of Python."""
    compute = reference.attention_and_scores

    @functools.lru_cache(maxsize=512)
    def result_of(call: bytes) -> tuple[np.ndarray, ...]:
        arguments, keywords = pickle.loads(call)
        results = compute(*arguments, **keywords)
        for array in results:
            array.flags.writeable = False
        return results

    def attention_and_scores(*arguments: Any, **keywords: Any) -> tuple[np.ndarray, ...]:
        try:
            call = pickle.dumps((arguments, keywords))
        except (AttributeError, pickle.PicklingError):  # a bias that is a function of the test
            return compute(*arguments, **keywords)
        return result_of(call) if len(call) <= SMALL_CALL else compute(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "attention_and_scores", attention_and_scores)
        yield


@pytest.fixture(autouse=True)
def _no_call_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that another test has made would keep the tiles and threads that were planned there."""
    override(monkeypatch, "CALL_CACHE", {})


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` draws no seed of its own: the tests do the same in each run."""
    override(monkeypatch, "new_seed", lambda: 0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20170612)


@pytest.fixture
def short_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` and `verify_layer` in less time, for tests that ask about a model, not about its report."""
    from short_runs import leave_out_long_runs, run_each_model_once  # they import onnx

    run_each_model_once(monkeypatch)
    leave_out_long_runs(monkeypatch)


@pytest.fixture(params=["maximum", "no maximum"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 6, so that small arrays are cut into several, the last of them smaller.

    Once more with the softmax without a maximum tried however few the scores are, where it is tried at all.
    """
    _choose_softmax(request, monkeypatch)
    cut_small(monkeypatch)


@pytest.fixture(params=["maximum", "no maximum"])
def tiles(library: Library, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles; on JAX, which compiles each shape anew, one of all pairs."""
    _choose_softmax(request, monkeypatch)
    if not library.name.startswith("jax"):
        cut_small(monkeypatch)


def _choose_softmax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no maximum":
        if "library" in request.fixturenames and request.getfixturevalue("library").name not in WRITEABLE:
            pytest.skip("a softmax without a maximum is tried where arrays are written to")
        override(monkeypatch, "LEAST_SCORES_WITHOUT_MAXIMUM", 0)
