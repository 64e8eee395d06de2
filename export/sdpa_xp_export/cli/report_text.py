"""A report as lines on the terminal, as a table of its runs, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from .._call.call import ExportCall
from .._call.text import to_json
from ..report import (
    LayerReport,
    Report,
    Run,
    closest_runs,
    compared_rows,
    described_error,
    in_column,
    shown_math_mode,
    verdict,
)
from .shared import NO, YES, say, say_table

SHOWN_FAILURES = 5
FACTS = (
    *("agrees", "form", "reason", "onnxruntime", "engine", "runtime", "notes", "smallest_failure"),
    *("math_mode", "seed", "reference", "left_out", "nodes"),
)
"""What JSON has of a report, beside its runs and placements."""


def show(report: LayerReport, failures: Sequence[str], *, runs: bool, thorough: bool) -> None:
    """Print the verdict, and what stands behind it: a line for each, below a table if all `runs` are shown."""
    if runs:
        columns, cells = run_table(report.runs)
        say_table(columns, [[{"yes": YES, "NO": NO}.get(cell, cell) for cell in row] for row in cells])
    say(f"{report.form}: {verdict(report)}")
    for line in filter(None, (*report.notes, report.smallest_failure)):
        say(line)
    for which, run in closest_runs(report).items():
        say(f"{which}: {run.output} of {run.inputs},")
        say(f"  on {run.provider}, {described_error(run)}")
    is_sample = any(run.compared < run.rows for run in report.runs)
    more = "" if thorough else "; --thorough compares more"
    say(f"rows compared: {compared_rows(report)}{f' (a sample of each long run{more})' if is_sample else ''}")
    say(origin(report))
    say(report.nodes)
    for mode in shown_math_mode(report):
        say(f"math mode: {mode}")
    repeats = f" (--seed {report.seed} repeats these runs)" if isinstance(report, Report) else ""
    say(f"seed: {report.seed}{repeats}")
    for line in report.left_out:
        say(f"not tried: {line}")
    for placed in report.fell_back:
        say(f"fell back: {placed.node} ({placed.op}) ran on {placed.provider}")
    for failure in failures[: None if runs else SHOWN_FAILURES]:
        say(f"FAILS: {failure}")
    if len(failures) > SHOWN_FAILURES and not runs:
        say(f"and {len(failures) - SHOWN_FAILURES} more; --runs shows all")


def facts(report: LayerReport, failures: Sequence[str]) -> dict[str, object]:
    """Return what JSON has of a report."""
    named = {"holds": not failures, "failures": failures} | {name: getattr(report, name) for name in FACTS}
    if isinstance(report, Report):
        named |= {"call": stated(report.call), "call_from_metadata": report.from_metadata}
        named |= {"computed_in": report.computed_in}
    return named | {name: list(map(asdict, getattr(report, name))) for name in ("runs", "placements")}


def origin(report: LayerReport) -> str:
    """Return where what the model was compared with comes from."""
    if not isinstance(report, Report):
        return f"the inputs and the results of the layer, in {report.reference}, were read from the golden file"
    return f"the call was read from {'the metadata' if report.from_metadata else 'the file of --call'}"


def stated(call: ExportCall) -> dict[str, object]:
    """Return the call as the metadata of its model state it."""
    return {name: value for name, value in json.loads(to_json(call)).items() if value is not None}


def run_table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the cells of a table of runs, without the provider or output of all of them."""
    rows = [
        {
            "lengths": run.inputs,
            "provider": run.provider,
            "output": run.output,
            "error": in_column(run.agreement.absolute),
            "bound": in_column(run.agreement.bound),
            "agrees": "yes" if run.agreement.agrees else "NO",
            "rows": f"{run.compared:,} of {run.rows:,}",
            "ms": f"{run.seconds * 1e3:.2f}",
            "peak MB": "unknown" if run.peak_bytes is None else f"{run.peak_bytes / 1e6:.1f}",
        }
        for run in runs
    ]
    same = [name for name in ("provider", "output") if len({row[name] for row in rows}) == 1]
    columns = [name for name in rows[0] if name not in same]
    return columns, [[row[name] for name in columns] for row in rows]
