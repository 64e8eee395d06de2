"""What `import sdpa_xp` takes beside `import numpy`, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys

from measuring import Row, Spread, ratios

ROUNDS = 15
STATEMENTS = ("import numpy", "import numpy, sdpa_xp")


def rows() -> list[Row]:
    """The first process of each statement writes the bytecode and fills the file cache, and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(1 + ROUNDS):
        for statement in STATEMENTS:
            times[statement].append(_seconds(statement))
    alone, both = (each[1:] for each in times.values())
    added = [ratio - 1 for ratio in ratios(both, alone)]
    numbers = (
        {"milliseconds": Spread.of(alone, 1e3)},
        {"milliseconds": Spread.of(both, 1e3), "added over import numpy": Spread.of(added)},
    )
    return [Row("import", 0, name, each, ROUNDS) for name, each in zip(STATEMENTS, numbers, strict=True)]


def _seconds(statement: str) -> float:
    """Without the start of the interpreter, and with the bytecode that an install has."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return float(done.stdout)
