"""A pytest plugin: run the tests that a file lists, in its order, and write down those that fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LIST = Path(os.environ["MUTANTS_CHOSEN"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: position for position, name in enumerate(LIST.read_text().splitlines())}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in place])
    items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    pytest_collectreport(report)


def pytest_collectreport(report: pytest.CollectReport | pytest.TestReport) -> None:
    if report.failed:
        with LIST.with_suffix(".failed").open("a") as failed:
            failed.write(f"{report.nodeid}\n")
