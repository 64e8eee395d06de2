"""How far each library and each exported form is from the reference, and the matrix of the releases."""

from __future__ import annotations

import json
from typing import Any

from evidence import DTYPES, FEATURES, ROOT, ROWS, about, column, table
from runtime.table import markdown


def page() -> str:
    return "\n\n".join([about(), *(of_dtype(dtype) for dtype in DTYPES), releases()])


def of_dtype(dtype: str) -> str:
    """The worst feature of each column, then the share of its bound that each feature uses up."""
    rows = [row for row in ROWS if row["dtype"] == dtype and row["jobs"]]
    header = ["computed by", "features", "worst error", "bound", "of the bound", "in"]
    lines = [[column(row), str(row["jobs"]), *worst(row)] for row in rows]
    shares = [[feature, *(share(row, feature) for row in rows)] for feature in FEATURES]
    each = table(["share of the bound", *map(column, rows)], shares)
    indented = "\n".join(f"    {line}" for line in each.splitlines())
    return f'## {dtype}\n\n{table(header, lines)}\n\n??? info "Each feature in {dtype}"\n\n{indented}'


def worst(row: dict[str, Any]) -> list[str]:
    """Of the feature that came nearest to its bound: its error, the bound, its share, its name."""
    name, found = max(ran(row).items(), key=lambda pair: used(pair[1]))
    return [f"{found['absolute']:.1e}", f"{found['bound']:.1e}", f"{used(found):.0%}", name]


def share(row: dict[str, Any], feature: str) -> str:
    found = ran(row).get(feature)
    return "refused" if found is None else f"{used(found):.0%}"


def ran(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {each["feature"]: each["agreement"] for each in row["features"] if each["agreement"]}


def used(found: dict[str, float]) -> float:
    return found["absolute"] / found["bound"] if found["bound"] else 0.0


def releases() -> str:
    """results/runtimes.json, under headings of this page."""
    results = json.loads((ROOT / "results" / "runtimes.json").read_text())
    title, _, rest = markdown(results).partition("\n")
    return f"## {title.removeprefix('# ')}\n{rest}"
