"""`python -m quality.budgets.count`: count the lines of code of each room, and what a small call loads.

A line of code is no docstring, no comment and not blank. budgets.toml has the most that each count may be, and
test_budgets.py compares.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUDGETS = Path(__file__).with_name("budgets.toml")
PACKAGES = {"sdpa_xp": "sdpa_xp", "export": "export/sdpa_xp_export"}
EXECUTION = {"is_traced", "is_writeable", "waits"}
"""What only an executor needs to know of a grid or an array."""
ANSWERING = ("sdpa_xp/_libraries", "sdpa_xp/_run", "sdpa_xp/_tiles/plan.py")
"""The libraries, which answer, and the executors and their plans, which may ask."""
OPTION = re.compile(r"\bsoftcap\b")
"""An option of each call, as an example."""
SMALL_CALL = """
import json, sys
import numpy as np
known = {*sys.modules}
from sdpa_xp import scaled_dot_product_attention
x = np.ones((1, 2, 3, 4), np.float32)
scaled_dot_product_attention(x, x, x, is_causal=True)
names = [name for name in sys.modules if name not in known and name.partition(".")[0] == "sdpa_xp"]
print(json.dumps([sys.modules[name].__file__ for name in names]))
"""


def code_lines(path: Path) -> int:
    """Return the number of lines of code of a file."""
    text = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            text_alone = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if text_alone and isinstance(statement.value.value, str):
                documented |= {*range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)}
    rows = enumerate(text.splitlines(), 1)
    return sum(bool(row.strip()) and row.strip()[0] != "#" for number, row in rows if number not in documented)


def rooms() -> dict[str, int]:
    """Return the lines of code of each folder of the packages, of the files beside them, and of all tests."""
    counted: dict[str, int] = {}
    for short, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).parts
            room = f"{short}/{parts[0]}" if len(parts) > 1 else f"{short}/*.py"
            counted[room] = counted.get(room, 0) + code_lines(path)
    for folder in ("tests", "quality"):
        counted[folder] = sum(map(code_lines, (ROOT / folder).rglob("*.py")))
    return counted


def asking(path: Path) -> int:
    """Return how often a file asks."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return sum(name in EXECUTION for name in names)


def questions() -> dict[str, int]:
    """Return how often code asks what only an executor should ask, and how many files spell an option."""
    library, exporter = (
        [path.read_text() for path in (ROOT / folder).rglob("*.py")] for folder in PACKAGES.values()
    )
    return {
        "places outside of executors that ask is_traced, is_writeable or waits": sum(
            asking(path)
            for path in (ROOT / "sdpa_xp").rglob("*.py")
            if not str(path.relative_to(ROOT)).startswith(ANSWERING)
        ),
        "files that spell softcap": sum(bool(OPTION.search(text)) for text in (*library, *exporter)),
    }


def small_call() -> dict[str, int]:
    """Return how many files, and lines of code, `import sdpa_xp` and a small NumPy call load."""
    command = [sys.executable, "-c", SMALL_CALL]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    files = [Path(name) for name in json.loads(printed)]
    return {"files of a small call": len(files), "lines of code of a small call": sum(map(code_lines, files))}


def counted() -> dict[str, dict[str, int]]:
    """Return all counts, as in the file of budgets."""
    sizes = rooms()
    totals = {
        short: sum(size for room, size in sizes.items() if room.startswith(f"{short}/")) for short in PACKAGES
    }
    return {"packages": totals, "rooms": sizes, "counts": questions() | small_call()}


def budgets() -> dict[str, Any]:
    """Return the file of budgets."""
    return tomllib.loads(BUDGETS.read_text())


def main() -> None:
    """Print each count beside its budget."""
    allowed = budgets()
    for section, values in counted().items():
        print(f"[{section}]")
        for name, number in values.items():
            print(f'"{name}" = {number}  # budget {allowed[section].get(name, "none")}')


if __name__ == "__main__":
    main()
