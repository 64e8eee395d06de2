"""What a program waits for until sdpa_xp has loaded, and until it has computed once, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys

from measuring import Row, Spread, ratios

ROUNDS = 15
IMPORT_NUMPY = "import numpy"
STATEMENTS = {
    IMPORT_NUMPY: IMPORT_NUMPY,
    "import numpy, sdpa_xp": "import numpy, sdpa_xp",
    "import the function": "import numpy; from sdpa_xp import scaled_dot_product_attention",
    "import all public names": "import numpy; from sdpa_xp import *",
    "import, and a first call": "import numpy; from sdpa_xp import scaled_dot_product_attention as attend;"
    "x = numpy.ones((1, 8, 256, 64), 'float32'); attend(x, x, x)",
    "import numpy, and the formula": "import numpy as np; x = np.ones((1, 8, 256, 64), 'float32');"
    "p = np.exp(x @ x.mT / 8); p / p.sum(-1, keepdims=True) @ x",
}


def rows() -> list[Row]:
    """Time each statement. Its first process writes bytecode and fills the file cache, and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(1 + ROUNDS):
        for name, statement in STATEMENTS.items():
            times[name].append(_seconds(statement))
    counted = {name: seconds[1:] for name, seconds in times.items()}
    return [Row("import", 0, name, _spreads(name, counted), ROUNDS) for name in STATEMENTS]


def _spreads(name: str, counted: dict[str, list[float]]) -> dict[str, Spread]:
    milliseconds = {"milliseconds": Spread.from_numbers(counted[name], 1e3)}
    if name == IMPORT_NUMPY:
        return milliseconds
    added = [ratio - 1 for ratio in ratios(counted[name], counted[IMPORT_NUMPY])]
    return milliseconds | {"added over import numpy": Spread.from_numbers(added)}


def _seconds(statement: str) -> float:
    """Return the seconds of a statement: without the start of the interpreter, with its bytecode written."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return float(process.stdout)
