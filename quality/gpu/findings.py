"""What each test says, written to a file as it comes: a run that is ended midway leaves what it had found.

`python -m pytest -p quality.gpu.findings --findings FILE` appends a line of JSON when a test starts and when it
ends.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the file is read where pytest may be missing
    import pytest

WORDS = 1_000
"""Characters kept of a message, from its end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--findings", type=Path, help="the file that gets a line for each test")


def pytest_configure(config: pytest.Config) -> None:
    # The workers of xdist report to the process that started them.
    if config.getoption("--findings") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(config.getoption("--findings")))


class Writer:
    """The hooks of pytest that write."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)  # a line is written when it is complete

    def write(self, test: str, outcome: str, message: object = "") -> None:
        line = {"test": test, "outcome": outcome, "message": str(message)[-WORDS:]}
        self.file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(nodeid, "running")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._report(report)

    def _report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        self.write(report.nodeid, report.outcome, reason.removeprefix("Skipped: "))

    def pytest_internalerror(self, excrepr: object) -> None:
        self.write("pytest", "failed", excrepr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(nodeid, "ended")


def read(path: Path) -> dict[str, Any]:
    """Return what the file says so far: counts, failures with their messages, and the tests that still ran."""
    running: dict[str, None] = {}
    ended: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}}
    for line in lines(path):
        test, outcome, message = line["test"], line["outcome"], line["message"]
        if outcome == "running":
            running[test] = None
            continue
        running.pop(test, None)
        if outcome in ended:  # each worker of xdist says what it could not collect
            ended[outcome][test] = message
    failed = ended["failed"]
    return {
        "passed": len(ended["passed"].keys() - failed.keys()),
        "failed": [{"test": test, "message": message} for test, message in failed.items()],
        "skipped": dict(Counter(ended["skipped"].values()).most_common()),
        "running": [*running],
    }


def lines(path: Path) -> list[dict[str, str]]:
    """Return the lines that are whole: the last may have been cut off."""
    texts = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    return [json.loads(text) for text in texts]
