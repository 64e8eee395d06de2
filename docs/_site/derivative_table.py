"""The derivatives of each library: which features have none, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from evidence import ROOT, code, table
from measuring import Row

RESULTS: dict[str, Any] = json.loads((ROOT / "results" / "derivatives.json").read_text())
TIMED = ("gradients", "tangent", "Hessian-vector product", "double backward", "Laplacian, two directions")
TIMED_LIBRARIES = ("NumPy", "torch", "JAX")
OWN = ", its own attention"
OF_SDPA_XP = (
    "scaled_dot_product_attention_vjp",
    "scaled_dot_product_attention_jvp",
    "pullback.jvp",
    "scaled_dot_product_attention_laplacian",
)


def page() -> str:
    """Return what was measured, and a table of the exceptions."""
    rows, libraries = RESULTS["rows"], libraries_of(RESULTS["rows"])
    return "\n\n".join(
        [
            f"In {', '.join(libraries)}, each derivative of {len(rows[0]['features'])} features was computed "
            "in float32. The errors are at most twice those of autograd through the formula. The exceptions:",
            exceptions(),
            memory(),
        ]
    )


def libraries_of(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["library"] for row in rows))


def exceptions() -> str:
    """Return a table of what is not computed, and why; libraries with the same exceptions share a line."""
    rows = RESULTS["rows"]
    every = libraries_of(rows)
    shared: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[str]] = {}
    for library in every:
        of_library = [row for row in rows if row["library"] == library]
        for why, (derivatives, features) in by_reason(of_library).items():
            shared.setdefault((derivatives, features, why), []).append(library)
    return table(
        ["in", "not computed", "of", "why"],
        [
            [
                "all" if libraries == every else ", ".join(libraries),
                listed(derivatives),
                listed(features),
                code(why),
            ]
            for (derivatives, features, why), libraries in shared.items()
        ],
    )


def by_reason(rows: list[dict[str, Any]]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the derivatives and the features of each reason, in the rows of one library."""
    reasons: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        for feature, outcome in row["features"].items():
            why = outcome.get("refused") or outcome.get("nan")
            if why:
                derivatives, features = reasons.setdefault(why, ({}, {}))
                derivatives[row["derivative"]] = features[feature] = None
    every = [row["derivative"] for row in rows]
    shown = {}
    for why, (derivatives, features) in reasons.items():
        # Another reason, which comes first, may have taken a few features.
        is_any = len(features) > len(rows[0]["features"]) * 0.7
        shown[why] = shortened(list(derivatives), every), ("all",) if is_any else tuple(features)
    return shown


def shortened(derivatives: list[str], every: list[str]) -> tuple[str, ...]:
    """Return the derivatives of a library, with one word for all of them and for those of sdpa_xp."""
    others = [name for name in every if name not in derivatives]
    if len(others) <= 2 and len(every) > len(OF_SDPA_XP):
        return (" but ".join(["all", *others[:1]]), *others[1:])
    if tuple(derivatives[: len(OF_SDPA_XP)]) == OF_SDPA_XP:
        return ("derivatives by sdpa_xp", *derivatives[len(OF_SDPA_XP) :])
    return tuple(derivatives)


def listed(names: tuple[str, ...]) -> str:
    """Return names, in code if they are names of Python."""
    return ", ".join(f"`{name}`" if " " not in name and {"_", "."} & {*name} else name for name in names)


def memory() -> str:
    """Return a sentence about the memory of long calls."""
    from quality.derivatives.memory import is_linear

    parts = []
    for library, peaks in RESULTS["memory"].items():
        measured = [name for name, megabytes in peaks.items() if megabytes]
        growing = [name for name in measured if not is_linear(peaks[name])]
        if growing:
            parts.append(f"{library} ({listed(shortened(growing, measured))})")
    return f"In {', '.join(RESULTS['memory'])}, memory grows with L + S, except in {' and '.join(parts)}."


def times() -> str:
    """Return a table of the times and the memory for 4,096 tokens, beside the library's own attention."""
    facts = json.loads((ROOT / "results" / "attention.json").read_text())
    measured = {
        (row.cell, row.contender): row.numbers
        for row in map(Row.read, facts["rows"])
        if row.length == 4096 and "derivatives" in row.cell
    }

    def cells(name: str) -> Iterator[str]:
        for library in TIMED_LIBRARIES:
            numbers = measured.get((f"derivatives, {library}", name))
            if numbers is None:
                yield "-"
                continue
            contenders = (name, name + OWN)
            peaks = (measured.get((f"memory of derivatives, {library}", contender)) for contender in contenders)
            memory = " of ".join(f"{peak['MB above the inputs'].median:.0f}" for peak in peaks if peak)
            over = numbers.get("over the library's own", numbers["over the call"])
            yield f"{over.median:.2g} ({memory} MB)"

    header = ["", "NumPy, over the call", "torch, over its own", "JAX, over its own"]
    return table(header, [[name, *cells(name)] for name in TIMED])
