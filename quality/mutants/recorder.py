"""A pytest plugin for a recording: which test runs which lines, how long it takes, and whether it passes.

Lines that a test runs in other processes of Python count, too. Of a function whose cases take long, some are
recorded, spread over all of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

WHERE = Path(os.environ["MUTANTS_RECORDING"])
SOURCES = os.environ["MUTANTS_SOURCES"].split(os.pathsep)
MOST = 12.0
"""Seconds of the cases of one function."""

recording = coverage.Coverage(data_file=str(WHERE.with_suffix(".coverage")), config_file=False, source=SOURCES)
recording.start()  # before conftest imports the packages
tracer = sys.gettrace()

# The processes that tests start read this file: coverage 7.17 installs a .pth that looks for the variable.
OTHER_PROCESSES = WHERE.with_suffix(".ini")
OTHER_PROCESSES.write_text(
    f"[run]\ndata_file = {WHERE.with_suffix('.coverage')}\nsource = {','.join(SOURCES)}\n"
    "parallel = true\npatch = _exit\ncontext = ${MUTANTS_TEST}\n"
)
os.environ["COVERAGE_PROCESS_START"] = str(OTHER_PROCESSES)

seconds: dict[str, float] = {}
of_function: dict[str, float] = defaultdict(float)
failed: set[str] = set()
skipped: set[str] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cases of a function: the first, then the one in the middle, those between, and so on."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[_function(item)].append(item)
    items[:] = [several[index] for several in cases.values() for index in _spread(len(several))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    start = time.perf_counter()
    recording.switch_context(item.nodeid)
    os.environ["MUTANTS_TEST"] = item.nodeid
    result = yield
    recording.switch_context("")
    if sys.gettrace() is not tracer:
        pytest.exit(f"{item.nodeid} ended the recording: it must put back what sys.gettrace() gave", 2)
    of_function[_function(item)] += time.perf_counter() - start
    return result


def pytest_runtest_setup(item: pytest.Item) -> None:
    if of_function[_function(item)] > MOST:
        pytest.skip("other cases are recorded")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid] = seconds.get(report.nodeid, 0) + report.duration
    if report.outcome != "passed":
        (failed if report.failed else skipped).add(report.nodeid)


def pytest_sessionfinish(exitstatus: int) -> None:
    recording.stop()
    recording.save()
    recording.combine()
    recording.save()
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # all tests have run
        passed = {name: round(spent, 4) for name, spent in seconds.items() if name not in failed | skipped}
        WHERE.write_text(json.dumps({"passed": passed, "failed": sorted(failed)}, indent=0))


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _spread(count: int) -> list[int]:
    """0 to count - 1, each early number far from the ones before it."""
    digits = max(count - 1, 1).bit_length()
    reversed_bits = (int(f"{index:0{digits}b}"[::-1], 2) for index in range(2**digits))
    return [index for index in reversed_bits if index < count]
