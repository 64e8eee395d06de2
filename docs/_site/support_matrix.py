"""The support matrix: for each feature, what computes it, in which dtypes, and why not in the others."""

from __future__ import annotations

from typing import Any

from evidence import DTYPES, FEATURES, NAMES, RESULTS, ROWS, Notes, about, column, columns, table

ABSENT = "it was not installed, or had no device, on the machine that made the matrix"


def page() -> str:
    notes = Notes("note")
    return "\n\n".join(
        [
            about(),
            "## On the array libraries",
            matrix(notes, columns(exported=False), RESULTS["absent"]),
            "## In exported graphs",
            f"The forms of an ONNX graph, exported for onnxruntime {RESULTS['libraries']['onnxruntime']} "
            "and run in it on the CPU.",
            matrix(notes, columns(exported=True), []),
            "## Why not",
            "These are the error messages of the refused calls.",
            notes.html(),
        ]
    )


def matrix(notes: Notes, names: list[str], absent: list[str]) -> str:
    """Return a table of features by libraries or forms; the columns of `absent` did not run."""
    missing = [f"not run here{notes.mark(ABSENT)}" for _ in absent]
    empty = ["-" for _ in absent]
    header = ["", *names, *(NAMES.get(name, name) for name in absent)]
    dtypes = ["dtypes", *(dtypes_cell(notes, name) for name in names), *missing]
    rows = [[f"`{f}`" if is_name(f) else f, *(cell(notes, f, n) for n in names), *empty] for f in FEATURES]
    return table(header, [dtypes, *rows])


def dtypes_cell(notes: Notes, name: str) -> str:
    """Return the cell with the dtypes in which a column computes something, and the others with reasons."""
    refused = [f"not {dtype}{notes.mark(reason(dtype, name))}" for dtype in DTYPES if not computes(dtype, name)]
    return "<br>".join([*(dtype for dtype in DTYPES if computes(dtype, name)), *refused])


def cell(notes: Notes, feature: str, name: str) -> str:
    """Return `yes`, or what is refused or wrong, in the dtypes in which the column computes something."""
    dtypes = [dtype for dtype in DTYPES if computes(dtype, name)]
    results = {dtype: result(dtype, name, feature) for dtype in dtypes}
    wrong = [dtype for dtype, outcome in results.items() if not outcome["agrees"]]
    refused: dict[str, list[str]] = {}
    for dtype, outcome in results.items():
        if outcome["refused"]:
            refused.setdefault(outcome["refused"], []).append(dtype)
    faults = [
        f"refused{'' if len(refusing) == len(dtypes) else ' for ' + ', '.join(refusing)}{notes.mark(message)}"
        for message, refusing in refused.items()
    ]
    faults += [f"**wrong** for {', '.join(wrong)}"] if wrong else []
    some_agree = len(wrong) + sum(map(len, refused.values())) < len(dtypes)
    return "; ".join((["yes"] if some_agree else []) + faults)


def computes(dtype: str, name: str) -> bool:
    return any(row["jobs"] for row in rows_of(dtype, name))


def reason(dtype: str, name: str) -> str:
    """Return why a column computes nothing in a dtype: it has no such arrays, or each graph is refused."""
    rows = rows_of(dtype, name)
    if not rows:
        settings = "JAX has it with `jax_enable_x64`" if name == "JAX" else "the standard does not have it"
        return f"{name} does not hold `{dtype}`: {settings}"
    refused: list[str] = [outcome["refused"] for outcome in rows[0]["features"]]
    return max(dict.fromkeys(refused), key=refused.count)


def result(dtype: str, name: str, feature: str) -> dict[str, Any]:
    (row,) = rows_of(dtype, name)
    return next(outcome for outcome in row["features"] if outcome["feature"] == feature)


def rows_of(dtype: str, name: str) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["dtype"] == dtype and column(row) == name]


def is_name(feature: str) -> bool:
    """Return whether the name of a feature is a name in code."""
    return " " not in feature and feature != "plain"
