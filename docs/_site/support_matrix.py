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
            notes.shown(),
        ]
    )


def matrix(notes: Notes, names: list[str], absent: list[str]) -> str:
    """A row a feature, a column a library or form; those in `absent` did not run."""
    missing = [f"not run here{notes.mark(ABSENT)}" for _ in absent]
    empty = ["-" for _ in absent]
    header = ["", *names, *(NAMES.get(name, name) for name in absent)]
    dtypes = ["dtypes", *(held(notes, name) for name in names), *missing]
    rows = [[f"`{f}`" if is_name(f) else f, *(cell(notes, f, n) for n in names), *empty] for f in FEATURES]
    return table(header, [dtypes, *rows])


def held(notes: Notes, name: str) -> str:
    """The dtypes in which a column computes anything at all, and those in which it does not."""
    refused = [f"not {dtype}{notes.mark(reason(dtype, name))}" for dtype in DTYPES if not computes(dtype, name)]
    return "<br>".join([*(dtype for dtype in DTYPES if computes(dtype, name)), *refused])


def cell(notes: Notes, feature: str, name: str) -> str:
    """`yes`, or the reasons and the dtypes that they are for; of dtypes in which it computes anything."""
    dtypes = [dtype for dtype in DTYPES if computes(dtype, name)]
    seen = {dtype: result(dtype, name, feature) for dtype in dtypes}
    wrong = [dtype for dtype, each in seen.items() if not each["agrees"]]
    why: dict[str, list[str]] = {}
    for dtype, each in seen.items():
        if each["refused"]:
            why.setdefault(each["refused"], []).append(dtype)
    told = [
        f"refused{'' if len(of) == len(dtypes) else ' for ' + ', '.join(of)}{notes.mark(text)}"
        for text, of in why.items()
    ]
    told += [f"**wrong** for {', '.join(wrong)}"] if wrong else []
    done = len(wrong) + sum(map(len, why.values())) < len(dtypes)
    return "; ".join((["yes"] if done else []) + told)


def computes(dtype: str, name: str) -> bool:
    return any(row["jobs"] for row in of(dtype, name))


def reason(dtype: str, name: str) -> str:
    """Why a column computes nothing in a dtype: it has no such arrays, or each graph is refused."""
    rows = of(dtype, name)
    if not rows:
        settings = "JAX has it with `jax_enable_x64`" if name == "JAX" else "the standard does not have it"
        return f"{name} does not hold `{dtype}`: {settings}"
    refused: list[str] = [each["refused"] for each in rows[0]["features"]]
    return max(dict.fromkeys(refused), key=refused.count)


def result(dtype: str, name: str, feature: str) -> dict[str, Any]:
    (row,) = of(dtype, name)
    return next(each for each in row["features"] if each["feature"] == feature)


def of(dtype: str, name: str) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["dtype"] == dtype and column(row) == name]


def is_name(feature: str) -> bool:
    """Whether a feature is called as it is written in code."""
    return " " not in feature and feature != "plain"
