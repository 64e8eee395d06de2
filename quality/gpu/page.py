"""The results of a run on a GPU as a page: what ran on which machine, what failed, and the table of times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMED = 3
"""Tests that are named of those with the same error; the file of results has all."""


def page(results: Mapping[str, Any], table: str) -> str:
    """Return the page; `table` is that of benchmarks/on_device.py, or empty."""
    title = "What ran on a GPU" if is_from_gpu(results) else "A trial without a GPU"
    lines = [f"# {title}", "", about(results), "", *summary(results)]
    for name, report in results["steps"].items():
        if report.get("failed") or report.get("running"):
            lines += ["", f"## Failures: {name}", "", *failures(report)]
    numbers = table.partition("\n")[2].replace("\n## ", "\n### ").strip() or "No cell was measured."
    return "\n".join([*lines, "", "## Attention in float16", "", numbers, ""])


def is_from_gpu(results: Mapping[str, Any]) -> bool:
    return results["device"] == "cuda" and bool(results["gpu"])


def gpu(results: Mapping[str, Any]) -> str:
    return " and ".join(results["gpu"].splitlines())


def about(results: Mapping[str, Any]) -> str:
    """Return a sentence with the machine, the day and the versions."""
    where = gpu(results) if is_from_gpu(results) else f"{results['cores']} cores of {results['cpu']}"
    packages = [text for text in results["packages"].values() if text != "not installed"]
    versions = ", ".join([f"Python {results['python']}", *packages])
    return f"{where}, {results['system']}, {results['date']}. {versions}."


def summary(results: Mapping[str, Any]) -> list[str]:
    """Return the steps as a table: how each ended, and how many tests passed, failed and were skipped."""
    rows = ["| step | result | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    for name, report in results["steps"].items():
        counts = [
            report.get("passed", ""),
            len(report["failed"]) if "failed" in report else "",
            sum(report["skipped"].values()) if "skipped" in report else "",
        ]
        cells = [name, ended(report).replace("|", "/"), *counts, report.get("seconds", "")]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


def ended(report: Mapping[str, Any]) -> str:
    reason = " ".join(report.get("reason", "").split())
    return f"{report['outcome']}: {reason}" if reason else str(report["outcome"])


def failures(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each error: the tests that it failed, or some of them."""
    tests_of: dict[str, list[str]] = {}
    for failure in report["failed"]:
        tests_of.setdefault(_error(failure["message"]), []).append(failure["test"])
    for error, tests in tests_of.items():
        names = ", ".join(f"`{test}`" for test in tests[:NAMED])
        more = f" and {len(tests) - NAMED} more" if len(tests) > NAMED else ""
        yield f"- `{error}`: {names}{more}"
    for test in report.get("running", []):
        yield f"- had not ended: `{test}`"


def _error(message: str) -> str:
    """Return the first line of the error in a message of pytest, or else the last line."""
    lines = message.strip().splitlines() or ["no message"]
    errors = [line[1:] for line in lines if line.startswith("E ")]
    return " ".join((errors or lines[-1:])[0].replace("`", "'").split())


def of_step(name: str, report: Mapping[str, Any]) -> str:
    """Return the lines that the run prints when a step has ended."""
    lines = failures(report) if "failed" in report else [report.get("printed", "")]
    seconds = f", {report['seconds']} s" if "seconds" in report else ""
    return "\n".join([f"{name}: {ended(report)}{counts(report)}{seconds}", *lines]).rstrip()


def counts(report: Mapping[str, Any]) -> str:
    """Return the numbers of tests, behind a comma, or nothing if the step has no tests."""
    if "passed" not in report:
        return ""
    skipped = sum(report["skipped"].values())
    return f", {report['passed']} tests passed, {len(report['failed'])} failed, {skipped} were skipped"
