"""Time several functions in turn, so that a temporary slowdown of the machine affects all of them."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import internals as internals  # whose names are private: the one place that the benchmarks take them from

ROUNDS, LONG_ROUNDS = 9, 5
"""The least number of rounds, and the least of calls that take seconds."""

PAUSE = 0.03
"""Seconds between turns: OpenBLAS's threads spin for 2**26 cycles after their work, and would take a core."""


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def from_numbers(cls, numbers: Iterable[float], factor: float = 1.0) -> Spread:
        scaled = [number * factor for number in numbers]
        low, median, high = statistics.quantiles(scaled, n=4) if len(scaled) > 1 else scaled * 3
        return cls(*(float(f"{number:.4g}") for number in (median, low, high)))

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Row:
    """The measurements of one contender in one cell of the tables: quantity -> spread."""

    cell: str
    length: int
    contender: str
    numbers: dict[str, Spread] = field(default_factory=dict)
    rounds: int = 1
    reason: str = ""
    """Why there are no numbers."""

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> Row:
        """Return the row of which `dataclasses.asdict` made `recorded`."""
        numbers = {name: Spread(**spread) for name, spread in recorded["numbers"].items()}
        return cls(**{**recorded, "numbers": numbers})

    def __str__(self) -> str:
        numbers = "; ".join(f"{name} {spread}" for name, spread in self.numbers.items()) or self.reason
        length = f", S = {self.length}" if self.length else ""
        return f"{self.cell}{length}, {self.contender}: {numbers}; rounds {self.rounds}"


def interleaved(
    runs: Mapping[str, Callable[[], object]], seconds: float, calls: int = 1, least: int = ROUNDS
) -> dict[str, list[float]]:
    """Return seconds per call of each function, one number per round; each function runs for about `seconds`.

    There are at least `least` rounds. A number is the mean of `calls` calls. Short calls are preceded by an
    untimed one, which warms the caches.
    The order changes from round to round.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    end = time.perf_counter() + seconds * len(runs)
    rounds = 0
    while time.perf_counter() < end or rounds < least:
        shuffle(order)
        for name in order:
            run = runs[name]
            time.sleep(PAUSE)
            if calls > 1:
                run()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - start) / calls)
        rounds += 1
    return times


def ratios(times: Iterable[float], bases: Iterable[float]) -> list[float]:
    """Return ratios round by round, so that only times measured close together are compared."""
    return [seconds / base for seconds, base in zip(times, bases, strict=True)]
