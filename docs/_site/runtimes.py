"""Tables of what the releases of onnxruntime do, from the files that `make runtimes` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "results"
KINDS = {
    "a row without keys": ("fullymasked", "boolmask", "softmax_precision", "empty"),
    "a soft cap": ("softcap",),
    "causal, with the number of real keys given": ("nonpad",),
    "the scores beside the output": ("qk_matmul_bias",),
}
"""What a case is about, by a word of its name; the first that fits."""


def standard() -> str:
    """ONNX's own cases: how many each release computes, refuses, and computes wrong without a word."""
    found, total = _read("conformance.json"), _read("conformance.json")["cases"]
    rows = []
    for release, faults in found["releases"].items():
        refused = sum(fault == "refused" for fault in faults.values())
        rows.append([release, total - len(faults), refused, len(faults) - refused])
    return _table(["onnxruntime", "right", "refused", "wrong"], rows)


def wrong() -> str:
    """What the cases that are computed wrong are about, and the worst that each release makes of it."""
    releases = _read("conformance.json")["releases"]
    rows = []
    for kind in (*KINDS, "something else"):
        cells = [_shown(kind, faults) for faults in releases.values()]
        if not {*cells} <= {"right", "refused"}:
            rows.append([kind, *cells])
    return _table(["what the case is about", *releases], rows)


def newest_wrong() -> set[str]:
    """What the cases are about that the newest release computes wrong."""
    newest = [*_read("conformance.json")["releases"].values()][-1]
    return {_kind(name) for name, fault in newest.items() if fault != "refused"}


def forms() -> str:
    """Which form is taken for how many of all calls, and that none is wrong."""
    found = _read("runtimes.json")
    rows = []
    for release, each in found["releases"].items():
        count = sum(len(form["wrong"]) for form in each["forms"].values())
        rows.append([release, *each["auto"].values(), count])
    names = next(iter(found["releases"].values()))["auto"]
    return _table(["onnxruntime", *names, "wrong"], rows)


def reasons(form: str) -> str:
    """Why a form is refused on the newest release, and for how many of all calls."""
    newest = [*_read("runtimes.json")["releases"].values()][-1]
    refused = newest["forms"][form]["refused"]
    return _table(["reason", "calls"], sorted(refused.items(), key=lambda each: -each[1]))


def calls() -> int:
    """How many calls the results are of."""
    return int(_read("runtimes.json")["calls"])


def _shown(kind: str, faults: dict[str, str]) -> str:
    own = [fault for name, fault in faults.items() if _kind(name) == kind]
    off = [float(fault.removeprefix("off by ")) for fault in own if fault.startswith("off by ")]
    if "NaN" in own:
        return "NaN"
    if off:
        return f"off by {max(off):g}"
    return "refused" if own else "right"


def _kind(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "something else")


def _read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def _table(header: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
