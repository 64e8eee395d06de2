"""The benchmarks, as they were measured: bars, plots, tables, on which machine and when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

import exported
import gpu_run
import plots
import report
from evidence import ROOT
from figures import inline
from measuring import Row

RESULTS = ROOT / "results"
SEEN = {
    "time": "Milliseconds over S, for all pairs and for causal calls, a line a library: all grow as S squared.",
    "ratio": "Time over that of torch SDPA, over S, for all pairs and for causal calls, a line a library.",
    "limit": "Share of the two matrix products alone in the whole time, over S, a line a library.",
    "memory": "Megabytes above inputs and output, over S: textbook lines rise, those of sdpa_xp stay flat.",
}
"""A description of each plot, for readers who do not see it."""


SAME_FORM = (
    "If the graph that beats auto most has the form that auto chose, both graphs are the "
    "same, and their ratio is noise."
)


def page() -> str:
    facts = json.loads((RESULTS / "attention.json").read_text())
    rows = [Row.read(row) for row in facts["rows"]]
    return "\n\n".join([*attention(facts, rows), *graphs(), *gpu_run.section()])


def attention(facts: dict[str, Any], rows: list[Row]) -> Iterator[str]:
    versions = ", ".join(f"{name} {facts[name]}" for name in facts["packages"])
    missed = [line for line in report.bars(rows) if "**no**" in line]
    yield "## Attention on the CPU"
    yield (
        f"{facts['call']}, {facts['cores']} cores of {facts['cpu']}, {facts['system']}, {facts['date']}. "
        f"Python {facts['python']}, {versions}. NumPy's BLAS: {facts['numpy_blas']}."
    )
    yield report.HOW
    for name, plot in plots.PLOTS.items():
        if (figure := plots.figure(rows, plot)) is not None:
            yield picture(figure, SEEN[name])
    yield "### Bars"
    count = len(report.bars(rows)) - 2
    yield f"The targets and the results: {len(missed)} of {count} are missed."
    yield "\n".join(report.bars(rows))
    yield "### Where the time goes"
    yield report.WHERE
    yield "\n".join(report.parts(rows))
    for cell, title, what in report.TABLES:
        if of_cell := [row for row in rows if row.cell == cell]:
            yield f"### {title}"
            yield what
            yield "\n".join(report.by_length(of_cell))


def graphs() -> Iterator[str]:
    text = exported.page(json.loads((RESULTS / "exported.json").read_text()))
    title, _, rest = text.partition("\n")
    yield f"## {title.removeprefix('# ')}"
    yield SAME_FORM
    yield "\n".join(map(chosen_second, rest.splitlines()))


def chosen_second(line: str) -> str:
    """Return a row of the table of graphs with the form that auto chose behind the call."""
    cells = line.split(" | ")
    if not line.startswith("| ") or len(cells) < 4:
        return line
    call, *others, form, ratio = cells
    return " | ".join([call, form, *others, ratio])


def long_graphs() -> str:
    """A table of the graphs of 4,096 tokens with open lengths: the one that auto chooses, and the formula."""
    cells = json.loads((RESULTS / "exported.json").read_text())["cells"]
    rows = ["| call | form | time | memory | `primitive`: time | memory |", "|---|---|---|---|---|---|"]
    for cell in cells:
        call, _, length = cell["call"].partition(", S = ")
        if length == "4,096, open":
            numbers = [
                f"{cell['graphs'][name][number]:,.0f}"
                for name in ("auto", "primitive")
                for number in ("milliseconds", "peak_megabytes")
            ]
            rows.append("| " + " | ".join([call, f"`{cell['auto']}`", *numbers]) + " |")
    return "\n".join(rows)


def causal_with_open_lengths() -> str:
    """A table of causal graphs with open lengths: the milliseconds of `tiled` and of `grouped_query`."""
    cells = json.loads((RESULTS / "exported.json").read_text())["cells"]
    rows = ["| tokens | `tiled` | `grouped_query` |", "|---|---|---|"]
    for cell in cells:
        call, _, length = cell["call"].partition(", S = ")
        if call == "causal" and length.endswith(", open"):
            times = [cell["graphs"][form]["milliseconds"] for form in ("tiled", "grouped_query")]
            cells_of_row = [length.removesuffix(", open"), *(f"{time:.3g} ms" for time in times)]
            rows.append("| " + " | ".join(cells_of_row) + " |")
    return "\n".join(rows)


def picture(figure: Any, alt: str) -> str:
    """Return a plot as HTML, in the text colour of the page, for light pages and dark ones."""
    svg = inline(figure).replace(plots.INK, "currentColor")
    return f'<div class="figure" role="img" aria-label="{escape(alt, quote=True)}">{svg}</div>'
