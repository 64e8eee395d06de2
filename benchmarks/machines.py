"""This machine beside others: `python benchmarks/machines.py [--record NAME]`.

results/machines has a file for each kind of CPU that was measured. README and the site take their ranges from
these files: a ratio of times depends on the kernels that BLAS and torch have for a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import attention
import bars
import machine
from cells import CELLS, ONE_QUERY
from contenders import LOOP, NUMPY, TORCH
from measuring import LONG_ROUNDS, Row, Spread
from tables import table

FOLDER = Path(__file__).parents[1] / "results" / "machines"
PACKAGES = ("numpy", "torch", "sdpa_xp")
SECONDS, FORMULA_ROUNDS = 0.05, 3
"""Seconds for each contender and cell, which long calls exceed; and the rounds of the slow formula."""


class Ratio(NamedTuple):
    """A ratio of the times of sdpa_xp on NumPy and of another contender."""

    cell: str
    length: int
    quantity: str

    def measured_in(self, rows: Sequence[Row]) -> Spread | None:
        """Return the ratio, or None if it was not measured."""
        place = (self.cell, self.length, NUMPY)
        numbers = (row.numbers for row in rows if (row.cell, row.length, row.contender) == place)
        return next(numbers, {}).get(self.quantity)

    def __str__(self) -> str:
        return f"{self.cell.partition(',')[0]}, {self.length:,} tokens: {self.quantity}"


CALLS, LENGTHS = ("all pairs", "causal"), (256, 1024, 4096)
RATIOS = (
    *(Ratio(cell, length, bars.TO_TORCH) for cell in CALLS for length in LENGTHS),
    Ratio("one query", ONE_QUERY.keys, bars.TO_TORCH),
    *(Ratio(cell, length, bars.TO_LOOP) for cell in CALLS for length in LENGTHS),
    *(Ratio(f"{cell}, beside the formula", LENGTHS[-1], bars.OF_TEXTBOOK) for cell in CALLS),
)


class Machine(NamedTuple):
    """A machine, and what was measured on it."""

    facts: dict[str, Any]
    rows: list[Row]

    @property
    def name(self) -> str:
        """The kind of its CPU."""
        return str(self.facts["name"])


def recorded() -> list[Machine]:
    """Return the machines of results/machines, the one with the fewest instructions first."""
    files = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    machines = [Machine(facts, [Row.read(row) for row in facts.pop("rows")]) for facts in files]
    return sorted(machines, key=lambda computer: machine.KINDS.index(computer.facts["instructions"]))


def calls() -> list[Row]:
    """Measure the calls that need no array of all pairs, in one process."""
    cells = [(cell, CELLS[cell](length)) for cell in CALLS for length in LENGTHS] + [("one query", ONE_QUERY)]
    compared = partial(attention.compared, seconds=SECONDS, names=(NUMPY, LOOP, TORCH), least=LONG_ROUNDS)
    return [row for cell, call in cells for row in compared(cell, call)]


def formula() -> list[Row]:
    """Measure the textbook formula, whose arrays of all pairs would slow others."""
    compared = partial(attention.beside_the_formula, seconds=SECONDS, least=FORMULA_ROUNDS)
    return [row for cell in CALLS for row in compared(cell, CELLS[cell](LENGTHS[-1]))]


def measured(name: str) -> Machine:
    """Measure this machine."""
    facts = machine.facts(*PACKAGES) | {"numpy_blas": machine.numpy_kernels()}
    rows = attention.measured({"here": [calls, formula]})
    return Machine({"name": name, **facts}, rows)


def beside(machines: Sequence[Machine]) -> list[str]:
    """Return a table of machines: the median of each ratio, and the quartiles if they were kept."""
    header = ["sdpa_xp on NumPy", *(computer.name for computer in machines)]
    measured_by = {ratio: [ratio.measured_in(computer.rows) or "" for computer in machines] for ratio in RATIOS}
    return table(header, [[str(ratio), *map(str, spreads)] for ratio, spreads in measured_by.items()])


def where(machines: Sequence[Machine]) -> str:
    """Return which machines these are, in one line."""
    text = "{name}: {cores} cores of {cpu}, NumPy with {numpy_blas}, {date}"
    return "; ".join(text.format(**computer.facts) for computer in machines) + "."


def range_of(ratio: Ratio, machines: Sequence[Machine]) -> tuple[float, float]:
    """Return the smallest and the largest median of a ratio."""
    spreads = [ratio.measured_in(computer.rows) for computer in machines]
    medians = [spread.median for spread in spreads if spread is not None]
    return min(medians), max(medians)


def main() -> None:
    machine.without_settings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", metavar="NAME", help="write results/machines/NAME.json")
    arguments = parser.parse_args()
    computer = measured(arguments.record or "here")
    machines = [*recorded(), computer]
    print(*beside(machines), where(machines), sep="\n")
    if arguments.record:
        rows = [dataclasses.asdict(row) for row in computer.rows]
        path = FOLDER / f"{arguments.record}.json"
        path.write_text(json.dumps({**computer.facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
