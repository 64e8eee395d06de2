"""Which test functions kill a mutant that no other kills, and which are never alone.

    python -m quality.mutants.matrix tests/core/masks

A test function is kept for what it alone kills, because it states a law of the contract, or because it is the
word that a user reads. `results/kills.json` has what each function killed, by seed.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
KILLS = ROOT / "results" / "kills.json"


def functions(folder: Path) -> Iterator[str]:
    """The test functions below a folder, as pytest names them."""
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(ROOT)}::{node.name}"


def counts(kills: dict[str, list[dict[str, dict[str, int]]]]) -> tuple[Counter[str], Counter[str]]:
    """How many mutants each function kills, and how many of them it kills alone."""
    rows = [row["killers"] for rows in kills.values() for row in rows]
    return Counter(name for row in rows for name in row), Counter(
        next(iter(row)) for row in rows if len(row) == 1
    )


def main() -> None:
    folder = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "tests")
    if not KILLS.exists():
        raise SystemExit(f"{KILLS.relative_to(ROOT)} is not there: `make mutants` writes it")
    every, alone = counts(json.loads(KILLS.read_text()))
    for name in sorted(functions(folder), key=lambda name: (alone[name], every[name], name)):
        print(f"{alone[name]:4} alone, {every[name]:4} in all  {name}")


if __name__ == "__main__":
    main()
