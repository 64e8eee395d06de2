"""The page of results: attention.json as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bars import ABOVE, ADDED, BARS, MEMORY, TO_ALL_PAIRS, TO_TORCH, Bar, is_met, reached, row_of
from contenders import LOOP, MATMULS, NUMPY, TORCH
from measuring import Row
from tables import table

HOW = """All contenders of a table ran in one process, in turns, in another order each round. A number is
the median of the rounds, with the quartiles in brackets; a ratio is taken round by round, then its median."""

WHERE = """Shares of the medians of sdpa_xp on NumPy, all pairs. The products, and the loop that has exp and row
sums as well, are written for this table, without the library, on the same tiles, BLAS and threads. The last
column is what the products alone take of torch's whole time: NumPy cannot be below it on this machine."""

TABLES = (
    ("all pairs", "All pairs", "Milliseconds; and the time over that of torch's scaled_dot_product_attention."),
    ("causal", "Causal", "Milliseconds, and over torch."),
    ("grouped heads", "Two key heads for eight query heads", "Milliseconds, and over torch."),
    (
        "padding value",
        "A quarter of the keys is padding, said by `masks.padding`",
        "Milliseconds, and over torch.",
    ),
    (
        "padding array",
        "A quarter of the keys is padding, said by a boolean array",
        "Milliseconds, and over torch.",
    ),
    ("one query", "One query against a cache", "Milliseconds, and over torch."),
    (
        "by call",
        "sdpa_xp on NumPy against itself",
        "Milliseconds, and over all pairs. Large scores: up to 7,800.",
    ),
    ("overhead", "Calls of (1, 1, 8, 8)", "Microseconds, and above the peer."),
    ("memory", "Peak memory", "MB above inputs and output, in a process of its own."),
    (
        "memory, one head",
        "Peak memory of one long head",
        "MB above inputs and output, in a process of its own.",
    ),
    ("import", "Import", "Milliseconds, and what is added to NumPy's."),
)
"""Cell, title, and what stands in it."""

FIRST = ("milliseconds", "microseconds", MEMORY)
SECOND = (TO_TORCH, TO_ALL_PAIRS, ABOVE, ADDED)


def page(facts: dict[str, Any], rows: Sequence[Row], plots: Iterable[str]) -> str:
    """The whole page, in Markdown."""
    versions = ", ".join(f"{name} {facts[name]}" for name in facts["packages"])
    about = [
        f"{facts['call']}, {facts['cores']} cores of {facts['cpu']}, {facts['system']}, {facts['date']}.",
        f"Python {facts['python']}, {versions}. NumPy's BLAS: {facts['numpy_blas']}.",
    ]
    lines = [
        "# Attention on the CPU",
        "",
        *about,
        "",
        HOW,
        "",
        "`python benchmarks/attention.py` writes this page.",
        "",
    ]
    tried = "[What was tried](../benchmarks/NOTES.md) to reach those that are missed."
    lines += ["## Bars", "", *bars(rows), "", tried, ""]
    lines += ["## Where the time goes", "", WHERE, "", *parts(rows), ""]
    lines += [f"![{name}](plots/{name}.svg)" for name in plots]
    for cell, title, what in TABLES:
        of_cell = [row for row in rows if row.cell == cell]
        if of_cell:
            lines += ["", f"## {title}", "", what, "", *by_length(of_cell)]
    return "\n".join([*lines, ""])


def parts(rows: Sequence[Row]) -> list[str]:
    """Of the time of all pairs on NumPy: the products, the softmax, and what is around them."""
    shown = []
    for length in dict.fromkeys(row.length for row in rows if row.cell == "all pairs"):
        at = {row.contender: row.numbers for row in rows if (row.cell, row.length) == ("all pairs", length)}
        if {NUMPY, MATMULS, LOOP, TORCH} <= at.keys():
            whole, products, loop, torch = (
                at[name]["milliseconds"].median for name in (NUMPY, MATMULS, LOOP, TORCH)
            )
            shares = (products / whole, (loop - products) / whole, (whole - loop) / whole, products / torch)
            shown.append([f"S = {length:,}", *(f"{share:.0%}" for share in shares)])
    return table(["", "products", "exp and sums", "the rest", "products over all of torch SDPA"], shown)


def bars(rows: Sequence[Row], wanted: Sequence[Bar] = BARS) -> list[str]:
    """Each bar with the median that was reached, or why there is none."""
    shown = []
    for bar in wanted:
        number, row = reached(bar, rows), row_of(bar, rows)
        verdict = (
            [(row and row.reason) or "not measured", ""]
            if number is None
            else [f"{number:.3g}", "yes" if is_met(bar, number) else "**no**"]
        )
        where = f"{bar.cell}, S = {bar.length:,}" if bar.length else bar.cell
        shown.append([where, bar.contender, bar.quantity, f"{bar.side} {bar.bound:g}", *verdict])
    return table(["call", "of", "quantity", "bar", "reached", "met"], shown)


def by_length(rows: Sequence[Row], shown: Sequence[str] = (*FIRST, *SECOND)) -> list[str]:
    """Contenders by lengths; of their numbers those `shown`."""
    lengths, names = (
        list(dict.fromkeys(each)) for each in zip(*((row.length, row.contender) for row in rows), strict=True)
    )
    at = {(row.contender, row.length): row for row in rows}
    header = ["", *(f"S = {length:,}" if length else "time" for length in lengths)]
    return table(
        header, [[name, *(_entry(at.get((name, length)), shown) for length in lengths)] for name in names]
    )


def _entry(row: Row | None, shown: Sequence[str]) -> str:
    if row is None:
        return ""
    return "<br>".join(str(row.numbers[name]) for name in shown if name in row.numbers) or row.reason
