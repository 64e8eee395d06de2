"""What results/agreement.json says: each feature, on each library and in each exported form."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS: dict[str, Any] = json.loads((ROOT / "results" / "agreement.json").read_text())
ROWS: list[dict[str, Any]] = RESULTS["rows"]
DTYPES = list(dict.fromkeys(row["dtype"] for row in ROWS))
FEATURES = [result["feature"] for result in ROWS[0]["features"]]
NAMES = {"numpy": "NumPy", "jax": "JAX", "dask": "Dask", "mlx": "MLX", "cupy": "CuPy"}
"""The name of each library that is written otherwise than its module."""


def column(row: dict[str, Any]) -> str:
    """Return what computed a row: a library, or the form of an exported graph."""
    name: str = row["implementation"] if row["backend"] == "onnxruntime" else row["backend"]
    return NAMES.get(name, f"`{name}`" if row["backend"] == "onnxruntime" else name)


def columns(*, exported: bool) -> list[str]:
    """Return the libraries, or the exported forms, in the order in which they ran."""
    return list(dict.fromkeys(column(row) for row in ROWS if (row["backend"] == "onnxruntime") == exported))


def about() -> str:
    """Return a sentence with versions, machine and day."""
    versions = ", ".join(f"{NAMES.get(name, name)} {version}" for name, version in RESULTS["libraries"].items())
    return (
        f"sdpa_xp {RESULTS['sdpa_xp']} with {versions}; Python {RESULTS['python']}, "
        f"{RESULTS['cores']} cores of {RESULTS['cpu']}, {RESULTS['system']}; {RESULTS['date']}."
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


class Notes:
    """The footnotes of a page. A reason has one note, however many cells refer to it."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.reasons: list[str] = []

    def mark(self, reason: str) -> str:
        """Return a link to the note with this reason; add the note if it is new."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        number = self.reasons.index(reason) + 1
        return f'<sup><a href="#{self.page}-{number}" aria-label="why: note {number}">{number}</a></sup>'

    def html(self) -> str:
        """Return the list of notes in HTML."""
        items = (
            f'<li id="{self.page}-{number}">{code(reason)}</li>'
            for number, reason in enumerate(self.reasons, start=1)
        )
        return f"<ol>{''.join(items)}</ol>"


def code(reason: str) -> str:
    """Return a message as HTML; names between backticks become code."""
    parts = escape(reason).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
