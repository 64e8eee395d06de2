"""The table of what the judge found of attention functions of the field, from results/judge.json."""

from __future__ import annotations

import json
from typing import Any

from evidence import ROOT

RESULTS = ROOT / "results" / "judge.json"
COLUMNS = {
    "A query whose keys are all masked gives": "no key",
    "With is_causal and more keys than queries, the diagonal starts at the": "causal",
    "A mask and is_causal": "mask and causal",
    "A NaN in a value that all queries mask": "masked NaN",
}
"""The questions that the table shows, and how it names them."""


def page() -> str:
    """Return the table, with the functions that have faults explained below it."""
    results = json.loads(RESULTS.read_text("utf-8"))
    verdicts: dict[str, dict[str, Any]] = results["verdicts"]
    lines = [
        f"| function | {' | '.join(COLUMNS.values())} | judged | faults |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for name, verdict in verdicts.items():
        answers = (short(verdict["profile"][question]) for question in COLUMNS)
        wide = sum(fault["dtype"] == "float64" for fault in verdict["faults"])
        faults = f"{len(verdict['faults'])}" + f" ({wide} in float64)" * bool(wide)
        lines.append(f"| {name} | {' | '.join(answers)} | {verdict['judged']} | {faults} |")
    versions = ", ".join(sorted({verdict["library"].partition(",")[0] for verdict in verdicts.values()}))
    others = f"keras {results['keras']} on NumPy, onnxruntime {results['onnxruntime']}"
    lines += ["", f"Judged on {results['date']} on {results['cpu']}: {versions}, {others}."]
    return "\n".join(lines) + "\n"


def short(answer: str) -> str:
    """Return an answer as a cell shows it."""
    return {"no such argument": "-", "reaches queries that mask it": "leaks", "has no effect": "hidden"}.get(
        answer, answer
    )
