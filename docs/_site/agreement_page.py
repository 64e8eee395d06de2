"""How far each library and each exported form is from the reference, and the matrix of the releases."""

from __future__ import annotations

import json
from typing import Any

from evidence import DTYPES, FEATURES, ROOT, ROWS, about, column, table

from quality.runtime.table import markdown


def page() -> str:
    return "\n\n".join([about(), *(of_dtype(dtype) for dtype in DTYPES), releases()])


def of_dtype(dtype: str) -> str:
    """Return the worst feature of each column, then a table of each error as a share of its bound."""
    rows = [row for row in ROWS if row["dtype"] == dtype and row["jobs"]]
    header = ["computed by", "features", "worst error", "bound", "of the bound", "in"]
    lines = [[column(row), str(row["jobs"]), *worst(row)] for row in rows]
    shares = [[feature, *(share(row, feature) for row in rows)] for feature in FEATURES]
    details = table(["share of the bound", *map(column, rows)], shares)
    indented = "\n".join(f"    {line}" for line in details.splitlines())
    return f'## {dtype}\n\n{table(header, lines)}\n\n??? info "Each feature in {dtype}"\n\n{indented}'


def worst(row: dict[str, Any]) -> list[str]:
    """Return the error, bound, share and name of the feature that came nearest to its bound."""
    name, agreement = max(agreements(row).items(), key=lambda pair: share_of_bound(pair[1]))
    percent = f"{share_of_bound(agreement):.0%}"
    return [f"{agreement['absolute']:.1e}", f"{agreement['bound']:.1e}", percent, name]


def share(row: dict[str, Any], feature: str) -> str:
    agreement = agreements(row).get(feature)
    return "refused" if agreement is None else f"{share_of_bound(agreement):.0%}"


def agreements(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the agreement of each feature that was computed."""
    return {result["feature"]: result["agreement"] for result in row["features"] if result["agreement"]}


def share_of_bound(agreement: dict[str, float]) -> float:
    return agreement["absolute"] / agreement["bound"] if agreement["bound"] else 0.0


def releases() -> str:
    """Return the tables of results/runtimes.json, under headings of this page."""
    results = json.loads((ROOT / "results" / "runtimes.json").read_text())
    title, _, rest = markdown(results).partition("\n")
    return f"## {title.removeprefix('# ')}\n{rest}"
