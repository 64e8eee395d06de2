"""A report as one HTML page, which loads no other file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from .._call.call import ExportCall
from .._call.text import to_json
from ..report import LayerReport, Report, Run, described_failure, in_column

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 16, 44
LEAST_SHARE = 1e-4
"""Runs that use up less of their bound stand on the lower edge."""
RUN_COLUMNS = ("lengths", "provider", "output", "error", "bound", "agrees", "rows", "ms", "peak MB")
_ELSEWHERE = "Nodes that ran on another provider than the one asked for"
NODE_COLUMNS = ("node that fell back", "op", "provider", "asked")

# A model is not trusted, and its metadata stand in the page: its policy forbids scripts and all other files.
_PAGE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


def page(report: LayerReport, model: str, failures: Sequence[str] = ()) -> str:
    """Return the page of a report on the model of that name; `failures` has a line for each failure."""
    verdict = "agrees" if report.agrees else "DISAGREES"
    if report.agrees and failures:
        verdict = "agrees, but not as required"
    facts = {
        "form": f"{report.form} ({report.reason})",
        "ran on": report.engine,
        **({"note": report.notes} if report.notes else {}),
        **({"smallest failing run": described_failure(report.failing[0])} if report.failing else {}),
        "nodes that ran": report.nodes,
        "seed": report.seed,
        **({"not tried": report.left_out} if report.left_out else {}),
        "compared with": origin(report),
        **(stated(report.call) if isinstance(report, Report) else {}),
    }
    elsewhere = (
        [*map(_safe, (node.node, node.op)), _marked(node.provider, good=False), _safe(node.requested)]
        for node in report.fell_back
    )
    return _PAGE.substitute(
        title=_safe(f"{model} {verdict}"),
        heading=f"{_safe(model)}: {_marked(verdict, good=not failures)}",
        summary=_safe(" ".join(str(report).split())),
        failures=_list(failures),
        facts="".join(f"<dt>{_safe(name)}</dt><dd>{_safe(_fact(fact))}</dd>\n" for name, fact in facts.items()),
        picture=_error_picture(report.runs),
        runs=_runs_table(report.runs),
        elsewhere=_table(_ELSEWHERE, NODE_COLUMNS, elsewhere) if report.fell_back else "",
    )


def origin(report: LayerReport) -> str:
    """Return where what the model was compared with comes from."""
    if not isinstance(report, Report):
        return f"the inputs and the results of the layer, in {report.reference}, were read from the golden file"
    return f"the call was read from {'the metadata' if report.from_metadata else 'the file of --call'}"


def stated(call: ExportCall) -> dict[str, object]:
    """Return the call as the metadata of its model state it."""
    read: dict[str, object] = json.loads(to_json(call))
    return {name: value for name, value in read.items() if value is not None}


def megabytes(count: int | None) -> str:
    """Return megabytes as a table shows them; "unknown" if the system does not tell."""
    return "unknown" if count is None else f"{count / 1e6:.1f}"


def _safe(text: str) -> str:
    """Escape text from an untrusted model: no markup, and no control characters."""
    return escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))


def _fact(fact: object) -> str:
    if isinstance(fact, tuple):
        return "; ".join(fact)
    return ", ".join(map(str, fact)) if isinstance(fact, list) else str(fact)


def run_table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the cells of a table of runs, without what is the same in all of them."""
    rows = [_run_cells(run) for run in runs]
    same = {
        "provider": len({run.provider for run in runs}) == 1,
        "output": len({run.output for run in runs}) == 1,
    }
    kept = [index for index, column in enumerate(RUN_COLUMNS) if not same.get(column)]
    return [RUN_COLUMNS[index] for index in kept], [[row[index] for index in kept] for row in rows]


def _runs_table(runs: Sequence[Run]) -> str:
    columns, cells = run_table(runs)
    marks = {"yes": _marked("yes", good=True), "NO": _marked("NO", good=False)}
    verdict = columns.index("agrees")
    rows = (
        [marks[cell] if number == verdict else _safe(cell) for number, cell in enumerate(row)] for row in cells
    )
    return _table("Runs, each against the float64 reference", columns, rows)


def _run_cells(run: Run) -> list[str]:
    agreement = run.agreement
    return [
        run.inputs,
        run.provider,
        run.output,
        in_column(agreement.absolute),
        in_column(agreement.bound),
        "yes" if agreement.agrees else "NO",
        f"{run.compared:,} of {run.rows:,}",
        f"{run.seconds * 1e3:.2f}",
        megabytes(run.peak_bytes),
    ]


def _marked(text: str, *, good: bool) -> str:
    return f'<span class="{"good" if good else "bad"}">{_safe(text)}</span>'


def _list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_safe(line)}</li>\n" for line in lines)
    return f"<ul>\n{items}</ul>\n" if lines else ""


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


def _error_picture(runs: Sequence[Run]) -> str:
    """Return the picture as SVG: both axes are logarithmic, and a line stands where the bound is."""
    longest = max(2, *(run.longest for run in runs))
    # An infinite share has no place on an axis.
    most = max(1.0, *(min(run.agreement.share, 1e6) for run in runs))
    decades = range(round(math.log10(LEAST_SHARE)), math.ceil(math.log10(most)) + 1)

    def x(length: int) -> float:
        share = math.log(max(length, 1)) / math.log(longest)
        return LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16)

    def y(share: float) -> float:
        exponent = math.log10(min(max(share, LEAST_SHARE), 10.0 ** decades[-1]))
        height = HEIGHT - TOP - BOTTOM
        return TOP + height * (decades[-1] - exponent) / (decades[-1] - decades[0])

    edge, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    lengths = sorted({1, *(4**power for power in range(1, 12) if 4**power < longest), longest})
    parts = [
        f'<line class="bound" x1="{LEFT}" x2="{edge}" y1="{y(1):.1f}" y2="{y(1):.1f}"/>',
        f'<text x="{edge}" y="{y(1) - 5:.1f}" text-anchor="end">bound</text>',
        f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{edge}"/>',
    ]
    parts += [
        f'<text x="{LEFT - 6}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        for power in decades
    ]
    parts += [
        f'<text x="{x(length):.1f}" y="{bottom + 16}" text-anchor="middle">{length}</text>'
        for length in lengths
    ]
    parts.append(f'<text x="{(LEFT + edge) / 2:g}" y="{HEIGHT - 8}" text-anchor="middle">longest length</text>')
    parts += [
        f'<circle class="{"in" if run.agreement.agrees else "beyond"}" r="3.5" '
        f'cx="{x(run.longest):.1f}" cy="{y(run.agreement.share):.1f}"/>'
        for run in runs
    ]
    beyond = sum(not run.agreement.agrees for run in runs)
    label = f"Error over bound of {len(runs)} runs, by the longest length; {beyond} are beyond their bound"
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f"<figcaption>{label}.</figcaption></figure>\n"
    )
