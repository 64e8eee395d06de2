"""Performance targets as data, and the values that were measured for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from cells import DECODING, TINY_MASKED
from contenders import BY_TORCH, NUMPY, ON_JAX, ON_TORCH, PORTABLE
from first_calls import OURS, TO_FIRST, TO_JITTED
from measuring import Row

TO_TORCH, LIMIT = "over torch SDPA", "the matmuls' share"
TO_LOOP = "over a bare loop"
"""Comparable between CPUs; the other ratios depend on how fast the BLAS and torch's kernel are on the CPU."""
OF_TEXTBOOK = "times as fast as the textbook formula"
TO_ALL_PAIRS, ABOVE = "over all pairs", "microseconds above the peer"
TO_BATCH, TO_NO_BIAS, TO_ATTENTION = "over one batch", "over no bias", "over attention"
TO_DEFAULT, TO_FLOAT32, TO_ARRAY = "over the default", "over float32", "over a boolean array"
OVER_CALL, OVER_OWN = "over the call", "over the library's own"
MEMORY, ADDED = "MB above inputs and output", "added over import numpy"
PEAK = "MB above the inputs"


LONG = (1024, 4096, 16384)


class Bar(NamedTuple):
    """A target: `quantity` of a contender in a cell must be at most, or at least, `bound`."""

    cell: str
    length: int
    contender: str
    quantity: str
    side: Literal["at most", "at least"]
    bound: float


BARS = (
    *(
        Bar(cell, length, NUMPY, TO_LOOP, "at most", bound)
        for cell in ("all pairs", "causal")
        for length, bound in ((256, 1.1), (1024, 1.05), (4096, 1.05))
    ),
    *(
        Bar(cell, length, NUMPY, TO_TORCH, "at most", bound)
        for cell, bounds in (("all pairs", (1.6, 1.35, 1.12)), ("causal", (1.7, 1.35, 1.15)))
        for length, bound in zip((256, 1024, 4096), bounds, strict=True)
    ),
    *(Bar(cell, call.keys, NUMPY, TO_TORCH, "at most", 1.3) for cell, call in DECODING.items()),
    Bar("by call", 4096, "causal", TO_ALL_PAIRS, "at most", 0.6),
    Bar("by call", 16384, "window", TO_ALL_PAIRS, "at most", 0.1),
    *(
        Bar(cell, length, ON_TORCH, TO_TORCH, "at most", 1.05)
        for cell in ("all pairs", "causal")
        for length in LONG
    ),
    *(Bar("padding array", length, ON_TORCH, TO_TORCH, "at most", 1.05) for length in LONG),
    *(Bar("padding value", length, ON_TORCH, TO_TORCH, "at most", 1.0) for length in LONG),
    *(
        Bar(f"{cell}, {kind}", length, BY_TORCH, TO_TORCH, "at most", bound)
        for kind in ("by torch", "bfloat16")
        for cell, length, bound in (
            *((cell, length, 1.05) for cell in ("all pairs", "causal") for length in LONG[:2]),
            ("one query", 4096, 1.3),
        )
    ),
    Bar("all pairs", 4096, PORTABLE, TO_TORCH, "at most", 1.4),
    Bar("packed sequences", 16, f"{NUMPY}, of one length", TO_BATCH, "at most", 1.5),
    Bar("packed sequences", 16, f"{NUMPY}, of 8 to 24 tokens", TO_BATCH, "at most", 1.5),
    Bar("paged caches", 512, f"{NUMPY}, of one length", TO_BATCH, "at most", 2.0),
    Bar("paged caches", 512, f"{NUMPY}, of 256 to 512 tokens", TO_BATCH, "at most", 2.0),
    *(
        Bar("biases", length, f"{NUMPY}, {name}", TO_NO_BIAS, "at most", bound)
        for name, bound in (("biases.alibi", 1.1), ("biases.relative", 1.3))
        for length in (1024, 4096)
    ),
    Bar("overhead", 8, NUMPY, ABOVE, "at most", 20),
    *(Bar("overhead", 8, f"{NUMPY}, {name}", ABOVE, "at most", 40) for name in TINY_MASKED),
    Bar("overhead", 8, ON_TORCH, ABOVE, "at most", 12),
    *(
        Bar(f"{cell}, first call", length, OURS, quantity, "at most", bound)
        for cell in ("all pairs", "causal")
        for quantity, bound in ((TO_FIRST, 2), (TO_JITTED, 1.1))
        for length in (1024, 4096)
    ),
    Bar("all pairs", 4096, ON_JAX, TO_TORCH, "at most", 1.3),
    Bar("causal", 4096, ON_JAX, TO_TORCH, "at most", 1.6),
    Bar("derivatives, NumPy", 4096, "tangent", OVER_CALL, "at most", 2.5),
    Bar("derivatives, NumPy", 4096, "Hessian-vector product", OVER_CALL, "at most", 6),
    *(Bar("memory", length, NUMPY, MEMORY, "at most", 4) for length in (256, 1024, 4096, 16384)),
    Bar("memory, one head", 100_000, NUMPY, MEMORY, "at most", 4),
    *(
        Bar("import", 0, name, ADDED, "at most", 0.333)
        for name in ("import numpy, sdpa_xp", "import the function")
    ),
)


def reached(bar: Bar, rows: Sequence[Row]) -> float | None:
    """Return the measured median of the bar's quantity, or None if it was not measured."""
    row = row_of(bar, rows)
    return row.numbers[bar.quantity].median if row is not None and bar.quantity in row.numbers else None


def row_of(bar: Bar, rows: Sequence[Row]) -> Row | None:
    """Return the row of the bar's contender and cell."""
    return next((row for row in rows if (row.cell, row.length, row.contender) == bar[:3]), None)


def is_met(bar: Bar, number: float) -> bool:
    return number <= bar.bound if bar.side == "at most" else number >= bar.bound
