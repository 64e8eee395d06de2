"""What is to be reached, as data, and what was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from contenders import NUMPY, ON_TORCH, PORTABLE
from measuring import Row

TO_TORCH, LIMIT = "over torch SDPA", "the matmuls' share"
TO_ALL_PAIRS, ABOVE = "over all pairs", "microseconds above the peer"
MEMORY, ADDED = "MB above inputs and output", "added over import numpy"


class Bar(NamedTuple):
    """`quantity` of a contender in a cell is to be at most, or at least, `bound`."""

    cell: str
    length: int
    contender: str
    quantity: str
    side: Literal["at most", "at least"]
    bound: float


BARS = (
    Bar("all pairs", 256, NUMPY, TO_TORCH, "at most", 1.5),
    Bar("all pairs", 1024, NUMPY, TO_TORCH, "at most", 1.0),
    Bar("all pairs", 4096, NUMPY, TO_TORCH, "at most", 0.7),
    Bar("all pairs", 16384, NUMPY, TO_TORCH, "at most", 0.7),
    Bar("causal", 256, NUMPY, TO_TORCH, "at most", 1.5),
    Bar("causal", 1024, NUMPY, TO_TORCH, "at most", 1.0),
    Bar("causal", 4096, NUMPY, TO_TORCH, "at most", 0.75),
    Bar("causal", 16384, NUMPY, TO_TORCH, "at most", 0.75),
    Bar("grouped heads", 256, NUMPY, TO_TORCH, "at most", 1.5),
    Bar("grouped heads", 1024, NUMPY, TO_TORCH, "at most", 1.0),
    Bar("grouped heads", 4096, NUMPY, TO_TORCH, "at most", 0.7),
    Bar("grouped heads", 16384, NUMPY, TO_TORCH, "at most", 0.7),
    Bar("padding value", 256, NUMPY, TO_TORCH, "at most", 1.5),
    Bar("padding value", 1024, NUMPY, TO_TORCH, "at most", 1.0),
    Bar("padding value", 4096, NUMPY, TO_TORCH, "at most", 0.7),
    Bar("padding value", 16384, NUMPY, TO_TORCH, "at most", 0.7),
    Bar("padding array", 256, NUMPY, TO_TORCH, "at most", 1.5),
    Bar("padding array", 1024, NUMPY, TO_TORCH, "at most", 1.0),
    Bar("padding array", 4096, NUMPY, TO_TORCH, "at most", 0.7),
    Bar("padding array", 16384, NUMPY, TO_TORCH, "at most", 0.7),
    Bar("one query", 4096, NUMPY, TO_TORCH, "at most", 2.0),
    Bar("all pairs", 4096, NUMPY, LIMIT, "at least", 0.75),
    Bar("by call", 4096, "causal", TO_ALL_PAIRS, "at most", 0.6),
    Bar("by call", 16384, "window", TO_ALL_PAIRS, "at most", 0.1),
    Bar("all pairs", 1024, ON_TORCH, TO_TORCH, "at most", 1.05),
    Bar("all pairs", 4096, ON_TORCH, TO_TORCH, "at most", 1.05),
    Bar("all pairs", 16384, ON_TORCH, TO_TORCH, "at most", 1.05),
    Bar("causal", 1024, ON_TORCH, TO_TORCH, "at most", 1.05),
    Bar("causal", 4096, ON_TORCH, TO_TORCH, "at most", 1.05),
    Bar("causal", 16384, ON_TORCH, TO_TORCH, "at most", 1.05),
    *(Bar("padding array", length, ON_TORCH, TO_TORCH, "at most", 1.05) for length in (1024, 4096, 16384)),
    Bar("all pairs", 4096, PORTABLE, TO_TORCH, "at most", 1.5),
    Bar("overhead", 8, NUMPY, ABOVE, "at most", 30),
    Bar("overhead", 8, ON_TORCH, ABOVE, "at most", 15),
    Bar("memory", 256, NUMPY, MEMORY, "at most", 64),
    Bar("memory", 1024, NUMPY, MEMORY, "at most", 64),
    Bar("memory", 4096, NUMPY, MEMORY, "at most", 64),
    Bar("memory", 16384, NUMPY, MEMORY, "at most", 64),
    Bar("memory, one head", 100_000, NUMPY, MEMORY, "at most", 64),
    Bar("import", 0, "import numpy, sdpa_xp", ADDED, "at most", 0.333),
)


def reached(bar: Bar, rows: Sequence[Row]) -> float | None:
    """The median of what the bar speaks of; None where it was not measured."""
    row = row_of(bar, rows)
    return row.numbers[bar.quantity].median if row is not None and bar.quantity in row.numbers else None


def row_of(bar: Bar, rows: Sequence[Row]) -> Row | None:
    """The row that the bar speaks of."""
    return next((row for row in rows if (row.cell, row.length, row.contender) == bar[:3]), None)


def is_met(bar: Bar, number: float) -> bool:
    return number <= bar.bound if bar.side == "at most" else number >= bar.bound
