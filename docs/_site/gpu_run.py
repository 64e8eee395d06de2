"""What results/gpu.json says of the run on a GPU. Without that file, nothing has been run on one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from evidence import ROOT

from quality.gpu import page

RESULTS = ROOT / "results" / "gpu.json"
NOTHING = "Nothing has been run on a GPU yet."


def results() -> dict[str, Any] | None:
    """Return the results, or None if there are none."""
    if not RESULTS.exists():
        return None
    read: dict[str, Any] = json.loads(RESULTS.read_text())
    if not page.is_from_gpu(read):
        raise ValueError(f"{RESULTS.name} must be from a GPU; got device={read['device']}, gpu={read['gpu']!r}")
    return read


def sentence(*steps: str) -> str:
    """Return what came of some steps of the run, or that nothing was run."""
    read = results()
    if read is None:
        return NOTHING
    reports = ((name, read["steps"].get(name, {"outcome": "not chosen"})) for name in steps)
    outcomes = "; ".join(f"{name}: {page.ended(report)}{page.counts(report)}" for name, report in reports)
    return f"Run on {page.gpu(read)}, {read['date']}: {outcomes}."


def summary() -> str:
    """Return the steps of the run as a table."""
    read = results()
    return NOTHING if read is None else "\n".join([page.about(read), "", *page.summary(read)])


def section() -> Iterator[str]:
    """Yield the section of the page of benchmarks."""
    yield "## On a GPU"
    if results() is None:
        yield f"{NOTHING} `python quality/gpu/run.py results/gpu.json` measures the table on one."
    else:
        yield RESULTS.with_suffix(".md").read_text().partition("\n")[2].replace("\n#", "\n##")
