"""What several files of tests of the exporter set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from short_runs import leave_out_long_runs, one_process, run_models_by


@pytest.fixture(scope="session")
def _process_of_models() -> Iterator[Callable[..., Any]]:
    with one_process() as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def models_share_a_process(monkeypatch: pytest.MonkeyPatch, _process_of_models: Callable[..., Any]) -> None:
    """`verify` starts none of its own; the tests in runtime/ are about that."""
    run_models_by(monkeypatch, _process_of_models)


@pytest.fixture
def few_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports with times and places, of fewer lengths; `short_verify` has neither."""
    leave_out_long_runs(monkeypatch)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 2 queries, the last of them smaller, and of the heads of 20 scores."""
    monkeypatch.setattr("sdpa_xp_export.forms.tiled.ROWS", 2)
    monkeypatch.setattr("sdpa_xp_export.lowering.blocks.SCORES_OF_A_STEP", 20)
