"""The time of `import sdpa_xp` compared with `import numpy`, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys

from measuring import Row, Spread, ratios

ROUNDS = 15
STATEMENTS = ("import numpy", "import numpy, sdpa_xp")


def rows() -> list[Row]:
    """Time each statement. Its first process writes bytecode and fills the file cache, and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(1 + ROUNDS):
        for statement in STATEMENTS:
            times[statement].append(_seconds(statement))
    numpy_alone, with_sdpa_xp = (seconds[1:] for seconds in times.values())
    added = [ratio - 1 for ratio in ratios(with_sdpa_xp, numpy_alone)]
    numbers = (
        {"milliseconds": Spread.from_numbers(numpy_alone, 1e3)},
        {
            "milliseconds": Spread.from_numbers(with_sdpa_xp, 1e3),
            "added over import numpy": Spread.from_numbers(added),
        },
    )
    return [Row("import", 0, name, spreads, ROUNDS) for name, spreads in zip(STATEMENTS, numbers, strict=True)]


def _seconds(statement: str) -> float:
    """Return the seconds of a statement: without the start of the interpreter, with its bytecode written."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return float(process.stdout)
