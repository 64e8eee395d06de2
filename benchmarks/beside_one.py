"""Runs compared with the first of them, which computes the same call or a simpler one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from contenders import NUMPY
from measuring import Row, Spread, interleaved, ratios


def rows(
    cell: str, length: int, runs: Mapping[str, Callable[[], object]], quantity: str, seconds: float
) -> list[Row]:
    """Time each run of sdpa_xp on NumPy; `quantity` is its time divided by that of the first."""
    for run in runs.values():
        run()
    timings = interleaved(runs, seconds)
    first = next(iter(runs))
    table_rows = []
    for name, times in timings.items():
        numbers = {"milliseconds": Spread.from_numbers(times, 1e3)}
        if name != first:
            numbers[quantity] = Spread.from_numbers(ratios(times, timings[first]))
        table_rows.append(Row(cell, length, f"{NUMPY}, {name}", numbers, len(times)))
    return table_rows
