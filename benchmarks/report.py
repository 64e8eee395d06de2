"""The page of results: attention.json as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bars import (
    ABOVE,
    ADDED,
    BARS,
    MEMORY,
    OF_TEXTBOOK,
    OVER_CALL,
    OVER_OWN,
    PEAK,
    TO_ALL_PAIRS,
    TO_ARRAY,
    TO_ATTENTION,
    TO_BATCH,
    TO_DEFAULT,
    TO_FLOAT32,
    TO_LOOP,
    TO_NO_BIAS,
    TO_TORCH,
    Bar,
    is_met,
    reached,
    row_of,
)
from cells import BY_TORCH, DECODING
from contenders import LOOP, MATMULS, NUMPY, TORCH
from derivatives import LIBRARIES
from first_calls import FIRST as FIRST_CALL
from first_calls import TO_FIRST, TO_JITTED
from measuring import Row
from tables import table

HOW = """All contenders of a ratio ran in one fresh process, one after the other, in a new order each round.
Each number is the median of the rounds, with the quartiles in brackets. A ratio is computed for each round,
and its median is shown. Calls of up to 4,096 tokens have at least 9 rounds, longer ones at least 5."""

WHERE = """Shares of the time of sdpa_xp on NumPy, all pairs. The matrix products, and a loop that adds exp and
row sums, were written for this table without the library, with the same tiles, BLAS and threads. The last
column is the time of the products alone as a share of torch's whole time. NumPy cannot be faster than that
here."""

TABLES = (
    ("all pairs", "All pairs", "Milliseconds, and the time divided by that of torch and of the bare loop."),
    ("causal", "Causal", "Milliseconds, and the time divided by that of torch and of the bare loop."),
    *(
        (
            f"{cell}, beside the formula",
            f"Beside the textbook formula: {cell}",
            "Milliseconds, and the time of the formula divided by that of sdpa_xp. The two ran in turns.",
        )
        for cell in ("all pairs", "causal")
    ),
    (
        "grouped heads",
        "Two key heads for eight query heads",
        "Milliseconds, and the time divided by that of torch.",
    ),
    (
        "padding value",
        "A quarter of the keys is padding, as `masks.padding`",
        "Milliseconds, and the time divided by that of torch.",
    ),
    (
        "padding array",
        "A quarter of the keys is padding, as a boolean array",
        "Milliseconds, and the time divided by that of torch.",
    ),
    *((cell, cell.capitalize(), "Milliseconds, and the time divided by that of torch.") for cell in DECODING),
    *(
        (
            cell,
            f"NumPy arrays by torch's kernel: {cell}",
            "Milliseconds, and the time divided by that of torch. These contenders ran alone, in turns.",
        )
        for cell in BY_TORCH
    ),
    ("packed sequences", "2,000 packed sequences", "Milliseconds, and the time divided by that of one batch."),
    ("paged caches", "64 paged caches", "Milliseconds, and the time divided by that of one batch."),
    ("biases", "Biases", "Milliseconds, and the time divided by that without a bias."),
    ("statistics", "Statistics of the weights", "Milliseconds, and the time divided by that of attention."),
    *(
        (
            f"{cell}, reproducible",
            f"The same bits in every batch: {cell}",
            "Milliseconds, and the time divided by that of the default.",
        )
        for cell in ("all pairs", "causal", "one query")
    ),
    (
        "quantised caches",
        "One query of a quantised cache",
        "Milliseconds, and the time divided by that of a float32 cache.",
    ),
    (
        "neighbours",
        "Neighbours up to 3 places away, in an image of 64 x 64 tokens",
        "Milliseconds, and the time divided by that of the same mask as a boolean array.",
    ),
    *(
        (
            f"derivatives, {library}",
            f"Derivatives: {library}",
            "Milliseconds, and the time divided by that of the call, and of the library's own attention.",
        )
        for library in LIBRARIES
    ),
    *(
        (
            f"memory of derivatives, {library}",
            f"Peak memory of derivatives: {library}",
            "MB besides the inputs; of JAX, those of the compiled program.",
        )
        for library in LIBRARIES
    ),
    (
        "by call",
        "sdpa_xp on NumPy against itself",
        "Milliseconds, and the time divided by that of all pairs. Large scores are up to 7,800.",
    ),
    (
        "overhead",
        "Calls of (1, 1, 8, 8)",
        "Microseconds, the time divided by that of torch, and the difference to the peer.",
    ),
    *(
        (
            f"{cell}, first call",
            f"The first call of JAX arrays: {cell}",
            "Seconds of the first call in a process, milliseconds of a later one, and both over jax.nn's.",
        )
        for cell in ("all pairs", "causal")
    ),
    ("memory", "Peak memory", "MB besides inputs and output, in a separate process."),
    (
        "memory, one head",
        "Peak memory of one long head",
        "MB besides inputs and output, in a separate process.",
    ),
    ("import", "Import", "Milliseconds, and the share added to the import of NumPy."),
)
"""Cell, title, and a sentence that explains the numbers."""

FIRST = (FIRST_CALL, "milliseconds", "microseconds", MEMORY, PEAK)
SECOND = (
    TO_TORCH,
    TO_LOOP,
    OF_TEXTBOOK,
    TO_ALL_PAIRS,
    TO_BATCH,
    TO_NO_BIAS,
    TO_ATTENTION,
    TO_DEFAULT,
    TO_FLOAT32,
    TO_ARRAY,
    OVER_CALL,
    OVER_OWN,
    ABOVE,
    ADDED,
    TO_FIRST,
    TO_JITTED,
)


def page(facts: dict[str, Any], rows: Sequence[Row], plots: Iterable[str]) -> str:
    """Return the whole page in Markdown."""
    versions = ", ".join(f"{name} {facts[name]}" for name in facts["packages"])
    about = [
        f"{facts['call']}, {facts['cores']} cores of {facts['cpu']} with {facts['instructions']}, "
        f"{facts['system']}, {facts['date']}.",
        f"Python {facts['python']}, {versions}. NumPy's BLAS: {facts['numpy_blas']}.",
    ]
    lines = [
        "# Attention on the CPU",
        "",
        *about,
        "",
        HOW,
        "",
        "`python benchmarks/attention.py` writes this page. The [targets](#bars) are at its end.",
    ]
    for cell, title, what in TABLES:
        of_cell = [row for row in rows if row.cell == cell]
        if of_cell:
            lines += ["", f"## {title}", "", what, "", *by_length(of_cell)]
    lines += ["", "## Where the time goes", "", WHERE, "", *parts(rows), ""]
    lines += [f"![{name}](plots/{name}.svg)" for name in plots]
    notes = "[What was tried](../benchmarks/NOTES.md) explains the missed bars."
    lines += ["", "## Bars", "", *bars(rows), "", notes]
    return "\n".join([*lines, ""])


def parts(rows: Sequence[Row]) -> list[str]:
    """Split the time of a call of all pairs on NumPy into products, softmax and overhead."""
    table_rows = []
    for length in dict.fromkeys(row.length for row in rows if row.cell == "all pairs"):
        numbers = {
            row.contender: row.numbers for row in rows if (row.cell, row.length) == ("all pairs", length)
        }
        if {NUMPY, MATMULS, LOOP, TORCH} <= numbers.keys():
            whole, products, loop, torch = (
                numbers[name]["milliseconds"].median for name in (NUMPY, MATMULS, LOOP, TORCH)
            )
            shares = (products / whole, (loop - products) / whole, (whole - loop) / whole, products / torch)
            table_rows.append([f"S = {length:,}", *(f"{share:.0%}" for share in shares)])
    return table(["", "products", "exp and sums", "the rest", "products over all of torch SDPA"], table_rows)


def bars(rows: Sequence[Row], targets: Sequence[Bar] = BARS) -> list[str]:
    """Return a table of the bars: the median that was reached, or why there is none."""
    table_rows = []
    for bar in targets:
        number, row = reached(bar, rows), row_of(bar, rows)
        verdict = (
            [(row and row.reason) or "not measured", ""]
            if number is None
            else [beside(number, bar.bound), "yes" if is_met(bar, number) else "**no**"]
        )
        where = f"{bar.cell}, S = {bar.length:,}" if bar.length else bar.cell
        table_rows.append([where, bar.contender, bar.quantity, f"{bar.side} {bar.bound:g}", *verdict])
    return table(["call", "of", "quantity", "bar", "reached", "met"], table_rows)


def beside(number: float, bound: float) -> str:
    """Return a number with three digits, or with four if three are those of another number, its bound."""
    short = f"{number:.3g}"
    return f"{number:.4g}" if number != bound == float(short) else short


def by_length(rows: Sequence[Row], quantities: Sequence[str] = (*FIRST, *SECOND)) -> list[str]:
    """Return a table of contenders by lengths, with these quantities."""
    lengths, names = (
        list(dict.fromkeys(values))
        for values in zip(*((row.length, row.contender) for row in rows), strict=True)
    )
    row_at = {(row.contender, row.length): row for row in rows}
    header = ["", *(f"S = {length:,}" if length else "time" for length in lengths)]
    return table(
        header,
        [[name, *(_entry(row_at.get((name, length)), quantities) for length in lengths)] for name in names],
    )


def _entry(row: Row | None, quantities: Sequence[str]) -> str:
    if row is None:
        return ""
    return "<br>".join(str(row.numbers[name]) for name in quantities if name in row.numbers) or row.reason
