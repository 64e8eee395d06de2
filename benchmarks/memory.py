"""Peak memory of one call in a separate process, measured by the operating system.

`python benchmarks/memory.py [--contender NAME] [--heads 1] [--length 100000]` prints the memory above
the inputs, and above the inputs and the output. At 100,000 queries and keys the scores of a head are 40 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import machine
import numpy as np
from bars import MEMORY
from cells import HEADS, Call
from contenders import CONTENDERS, NUMPY, QUADRATIC, TEXTBOOK, TORCH
from measuring import Row, Spread, internals

LONG = 100_000
CELLS = {"memory": HEADS, "memory, one head": 1}


def rows(cell: str, length: int) -> list[Row]:
    """Measure each contender, except those that would build too many scores."""
    names = (NUMPY, TORCH, TEXTBOOK) if length <= QUADRATIC else (NUMPY, TORCH)
    return [row for name in names for row in _row(cell, length, name)]


def _row(cell: str, length: int, name: str) -> list[Row]:
    options = ["--contender", name, "--heads", str(CELLS[cell]), "--length", str(length)]
    process = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=True)
    peaks = json.loads(process.stdout)
    numbers = {quantity: Spread.from_numbers([megabytes]) for quantity, megabytes in peaks.items()}
    return [Row(cell, length, name, numbers)] if numbers else []


def peak(name: str, heads: int, length: int) -> dict[str, float]:
    """Return the peak memory of the process in megabytes, or nothing if the system does not report it."""
    small, call = (Call(size, size, heads=heads, key_heads=heads) for size in (8, length))
    contender = CONTENDERS[name]
    first, second = contender(small), contender(call)
    assert first is not None
    assert second is not None
    first.run()  # loads what is loaded once, which is not counted
    output, above = internals.peak_above(second.run)
    if above is None:
        return {}
    return {
        "MB above inputs": above / 1e6,
        MEMORY: max(0, above - np.asarray(output).nbytes) / 1e6,
    }


def main() -> None:
    machine.without_settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contender", choices=(NUMPY, TORCH, TEXTBOOK), default=NUMPY)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--length", type=int, default=LONG)
    arguments = parser.parse_args()
    print(json.dumps(peak(arguments.contender, arguments.heads, arguments.length)))


if __name__ == "__main__":
    main()
