"""The benchmarks, as they were measured: bars, plots, tables, on which machine and when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

import gpu_run
import machines
import plots
import report
from bars import MEMORY, OF_TEXTBOOK, TO_TORCH
from evidence import ROOT
from figures import inline
from measuring import Row

RESULTS = ROOT / "results"


def page() -> str:
    return "\n\n".join([*by_machine(), *at_a_glance(), *graphs(), *gpu_run.section()])


def by_machine() -> Iterator[str]:
    """Yield what depends on the kernels that BLAS and torch have for a CPU."""
    recorded = machines.recorded()
    yield "## By CPU"
    yield (
        "The time of sdpa_xp on NumPy arrays, over that of torch SDPA and of a loop that computes the same "
        "tiles without the library; and how many times as fast as the textbook formula it is. 8 heads of "
        "width 64, float32. Medians, and quartiles in brackets if they were kept."
    )
    yield "\n".join(machines.beside(recorded))
    yield machines.where(recorded)


def at_a_glance() -> Iterator[str]:
    """Yield one picture, what follows from it, and where all results are."""
    facts = json.loads((RESULTS / "attention.json").read_text())
    rows = [Row.read(row) for row in facts["rows"]]
    versions = ", ".join(f"{name} {facts[name]}" for name in facts["packages"])
    yield "## Attention on the CPU"
    yield "4,096 tokens, 8 heads of width 64, float32. A faint bar is the library's own function."
    yield picture(
        plots.at_a_glance(rows),
        "Bars of milliseconds for all pairs and for causal calls: sdpa_xp on NumPy and on torch take about as "
        "long as torch SDPA, sdpa_xp on JAX less than jax.nn.",
    )
    to_torch = {cell: spread(rows, cell, "sdpa_xp on NumPy", TO_TORCH) for cell in ("all pairs", "causal")}
    to_formula = spread(rows, "all pairs, beside the formula", "sdpa_xp on NumPy", OF_TEXTBOOK)
    ours, formula = (spread(rows, "memory", name, MEMORY) for name in ("sdpa_xp on NumPy", "textbook NumPy"))
    yield (
        f"On NumPy, sdpa_xp takes {to_torch['all pairs'].median:.2f} times as long as torch's attention, "
        f"and {to_torch['causal'].median:.2f} times with a causal mask. It is {to_formula.median:.1f} times "
        f"as fast as the textbook formula, and needs {ours.median:.1f} MB above its inputs and output, the "
        f"formula {formula.median:,.0f} MB."
    )
    missed = [line for line in report.bars(rows) if "**no**" in line]
    yield (
        f"Measured on {facts['cores']} cores of {facts['cpu']} ({facts['instructions']}), {facts['date']}, "
        f"{facts['system']}, with "
        f"Python {facts['python']}, {versions}. `results/attention.md` in the source has every length and "
        "call, the quartiles, the time of one query and of short calls, and the targets, of which "
        f"{len(missed)} of {len(report.bars(rows)) - 2} were missed; `benchmarks/NOTES.md` says what was "
        "tried."
    )


def spread(rows: list[Row], cell: str, contender: str, quantity: str) -> Any:
    """Return the median and the quartiles for 4,096 tokens."""
    (row,) = (row for row in rows if (row.cell, row.length, row.contender) == (cell, 4096, contender))
    return row.numbers[quantity]


def graphs() -> Iterator[str]:
    facts = json.loads((RESULTS / "exported.json").read_text())
    yield "## Exported graphs in onnxruntime"
    yield (
        "4,096 tokens with open lengths: the form that `auto` chooses for `onnxruntime>=1.31;cpu`, beside "
        "the form that writes the formula. With the default, `>=1.28`, all pairs get `tiled`. Times are "
        f"milliseconds on {facts['cores']} cores of {facts['cpu']} ({facts['instructions']}), and memory is MB "
        "at its peak. `results/exported.md` has fixed lengths and all forms."
    )
    yield long_graphs()
    yield from through_jit()


def through_jit() -> Iterator[str]:
    """The calls of NumPy users through `jit`, if they were measured, beside torch's kernel and NumPy."""
    cells = json.loads((RESULTS / "exported.json").read_text()).get("jit", [])
    names = ("jit", "bare session", "torch SDPA", "sdpa_xp on NumPy")
    rows = [
        "| " + " | ".join([cell["call"], *(f"{cell['milliseconds'][name]:.3g}" for name in names)]) + " |"
        for cell in cells
        if all(name in cell["milliseconds"] for name in names)
    ]
    if rows:
        yield (
            "Arrays of NumPy through [`jit`][sdpa_xp_export.jit], which onnxruntime computes, in "
            "milliseconds on the same cores; a bare session runs the same graph:"
        )
        yield "\n".join(["| call | " + " | ".join(names) + " |", "|---|---|---|---|---|", *rows])


def long_graphs() -> str:
    """A table of the graphs of 4,096 tokens with open lengths: the one that auto chooses, and the formula."""
    cells = json.loads((RESULTS / "exported.json").read_text())["cells"]
    rows = ["| call | form | time | memory | `primitive`: time | memory |", "|---|---|---|---|---|---|"]
    for cell in cells:
        call, _, length = cell["call"].partition(", S = ")
        if length == "4,096, open":
            measured = (
                cell["graphs"][name][number]
                for name in ("auto", "primitive")
                for number in ("milliseconds", "peak_megabytes")
            )
            numbers = [f"{number:,.0f}" if number >= 10 else f"{number:.1f}" for number in measured]
            rows.append("| " + " | ".join([call, f"`{cell['auto']}`", *numbers]) + " |")
    return "\n".join(rows)


def picture(figure: Any, alt: str) -> str:
    """Return a plot as HTML, in the text colour of the page, for light pages and dark ones."""
    svg = inline(figure).replace(plots.INK, "currentColor")
    return f'<div class="figure" role="img" aria-label="{escape(alt, quote=True)}">{svg}</div>'
