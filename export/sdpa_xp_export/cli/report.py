"""A report as lines on the terminal, as JSON, and as one HTML page, which loads no other file.

report.html holds all of the page but its rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template

from .._call.call import ExportCall
from .._call.text import to_json
from ..report import (
    LayerReport,
    Report,
    Run,
    closest_runs,
    compared_rows,
    described_error,
    described_failure,
    in_column,
    shown_math_mode,
    verdict,
)
from .terminal import NO, YES, say, say_table

SHOWN_FAILURES = 5
FACTS = (
    *("agrees", "form", "reason", "onnxruntime", "engine", "runtime", "notes", "smallest_failure"),
    *("math_mode", "seed", "reference", "left_out", "nodes"),
)
"""What JSON has of a report, beside its runs and placements."""
LEFT, RIGHT, TOP, BOTTOM = 60, 624, 16, 196
"""The edges of the picture's axes."""
LEAST_SHARE = 1e-4
"""Runs that use up less of their bound stand on the lower edge."""
_ELSEWHERE = "Nodes that ran on another provider than the one asked for"
NODE_COLUMNS = ("node that fell back", "op", "provider", "asked")

# A model is not trusted, and its metadata stand in the page: its policy forbids scripts and all other files.
_PAGE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


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


def page(report: LayerReport, model: str, failures: Sequence[str] = ()) -> str:
    """Return the page of a report on the model of that name; `failures` has a line for each failure."""
    verdict = "agrees" if report.agrees else "DISAGREES"
    if report.agrees and failures:
        verdict = "agrees, but not as required"
    facts = {
        "form": f"{report.form} ({report.reason})",
        "ran on": report.engine,
        "note": "; ".join(report.notes),
        "smallest failing run": described_failure(report.failing[0]) if report.failing else "",
        "nodes that ran": report.nodes,
        "seed": str(report.seed),
        "not tried": "; ".join(report.left_out),
        "compared with": origin(report),
    }
    if isinstance(report, Report):
        call = stated(report.call).items()
        facts |= {
            name: ", ".join(map(str, fact)) if isinstance(fact, list) else str(fact) for name, fact in call
        }
    columns, cells = run_table(report.runs)
    marks = {"yes": _marked("yes", good=True), "NO": _marked("NO", good=False)}
    is_verdict = [column == "agrees" for column in columns]
    runs = (
        [marks[cell] if marked else _safe(cell) for cell, marked in zip(row, is_verdict, strict=True)]
        for row in cells
    )
    elsewhere = (
        [*map(_safe, (node.node, node.op)), _marked(node.provider, good=False), _safe(node.requested)]
        for node in report.fell_back
    )
    label = f"Error over bound of {len(report.runs)} runs, by the longest length; "
    return _PAGE.substitute(
        title=_safe(f"{model} {verdict}"),
        heading=f"{_safe(model)}: {_marked(verdict, good=not failures)}",
        summary=_safe(" ".join(str(report).split())),
        failures="".join(
            ["<ul>\n", *(f"<li>{_safe(line)}</li>\n" for line in failures), "</ul>\n"] if failures else []
        ),
        facts="".join(
            f"<dt>{_safe(name)}</dt><dd>{_safe(fact)}</dd>\n" for name, fact in facts.items() if fact
        ),
        label=label + f"{len(report.failing)} are beyond their bound",
        picture="".join(_error_picture(report.runs)),
        runs=_table("Runs, each against the float64 reference", columns, runs),
        elsewhere=_table(_ELSEWHERE, NODE_COLUMNS, elsewhere) if report.fell_back else "",
    )


def _safe(text: str) -> str:
    """Escape text from an untrusted model: no markup, and no control characters."""
    return escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))


def _marked(text: str, *, good: bool) -> str:
    return f'<span class="{"good" if good else "bad"}">{_safe(text)}</span>'


def _table(caption: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are escaped already; a wide one scrolls, also by keyboard."""
    head = "".join(f'<th scope="col">{_safe(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>\n'
        for first, *rest in rows
    )
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{_safe(caption)}">\n<table>\n'
        f"<caption>{_safe(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n"
        "</table>\n</div>\n"
    )


def _error_picture(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what the picture shows, as SVG: both axes are logarithmic, and a line stands where the bound is."""
    longest = max(2, *(run.longest for run in runs))
    # An infinite share has no place on an axis.
    most = max(1.0, *(min(run.agreement.share, 1e6) for run in runs))
    decades = range(round(math.log10(LEAST_SHARE)), math.ceil(math.log10(most)) + 1)

    def x(length: int) -> str:
        return f"{LEFT + 8 + math.log(max(length, 1), longest) * (RIGHT - LEFT - 16):.1f}"

    def y(share: float, below: int = 0) -> str:
        exponent = math.log10(min(max(share, LEAST_SHARE), 10.0 ** decades[-1]))
        height = (decades[-1] - exponent) / (decades[-1] - decades[0]) * (BOTTOM - TOP)
        return f"{TOP + height + below:.1f}"

    yield f'<line class="bound" x1="{LEFT}" x2="{RIGHT}" y1="{y(1)}" y2="{y(1)}"/>'
    yield f'<text x="{RIGHT}" y="{y(1, -5)}" text-anchor="end">bound</text>'
    for share in (10.0**power for power in decades):
        yield f'<text x="{LEFT - 6}" y="{y(share, 4)}" text-anchor="end">{share:g}</text>'
    for length in sorted({1, *(4**power for power in range(1, 12) if 4**power < longest), longest}):
        yield f'<text x="{x(length)}" y="{BOTTOM + 16}" text-anchor="middle">{length}</text>'
    for run in runs:
        kind = "in" if run.agreement.agrees else "beyond"
        yield f'<circle class="{kind}" r="3.5" cx="{x(run.longest)}" cy="{y(run.agreement.share)}"/>'
