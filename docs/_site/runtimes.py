"""Tables of what the releases of onnxruntime do, from the files that `make runtimes` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "results"
DEFECTS = Path(__file__).parents[2] / "export/sdpa_xp_export/_runtime/defects.json"
KINDS = {
    "a row without keys": ("fullymasked", "boolmask", "softmax_precision", "empty"),
    "a soft cap": ("softcap",),
    "causal, with the number of real keys given": ("nonpad",),
    "the scores, as a second output": ("qk_matmul_bias",),
}
"""The subject of a case -> words of its name. The first subject that fits counts."""


def standard() -> str:
    """Return the table of ONNX's own cases: how many each release gets right, refuses, and gets wrong."""
    results = _read("conformance.json")
    total, rows = results["cases"], []
    for release, faults in results["releases"].items():
        refused = sum(fault == "refused" for fault in faults.values())
        rows.append([release, total - len(faults), refused, len(faults) - refused])
    return _table(["onnxruntime", "right", "refused", "wrong"], rows)


def wrong() -> str:
    """Return the table of the subjects that some release gets wrong, with each release's worst result."""
    releases = _read("conformance.json")["releases"]
    rows = []
    for kind in (*KINDS, "something else"):
        cells = [_worst(kind, faults) for faults in releases.values()]
        if not {*cells} <= {"right", "refused"}:
            rows.append([kind, *cells])
    return _table(["what the case is about", *releases], rows)


def newest_wrong() -> set[str]:
    """Return the subjects of the cases that the newest release gets wrong."""
    newest = [*_read("conformance.json")["releases"].values()][-1]
    return {_kind(name) for name, fault in newest.items() if fault != "refused"}


def defects() -> str:
    """Return the table of known errors: the operator, where it is wrong, in which releases, and how."""
    names = {"cpu": "onnxruntime", "webgpu": "onnxruntime, WebGPU", "openvino": "OpenVINO"}
    rows = []
    for defect in json.loads(DEFECTS.read_text("utf-8"))["defects"].values():
        ends = [
            f"{word} {defect[name]}"
            for name, word in (("since", "from"), ("until", "before"))
            if name in defect
        ]
        where = f"{names[defect['provider']]}, {' and '.join(ends) or 'all that were tried'}"
        rows.append([f"`{defect['node']}`", defect["what"], where])
    return _table(["operator", "what it does", "releases"], rows)


def forms() -> str:
    """Return the table of how often `auto` chooses each form, and how many calls of all forms are wrong."""
    releases = _read("runtimes.json")["releases"]
    rows = []
    for release, results in releases.items():
        count = sum(len(form["wrong"]) for form in results["forms"].values())
        rows.append([release, *results["auto"].values(), count])
    names = next(iter(releases.values()))["auto"]
    return _table(["onnxruntime", *names, "wrong"], rows)


def browsers() -> str:
    """Return the table of the forms in browsers and other programs: the calls that are right, and refused."""
    results = _read("browsers.json")
    header = ["form"]
    for name, measured in results.items():
        place = {"wasm": "`wasm`, ", "webgpu": "`webgpu` on a software adapter, "}.get(name, "")
        header.append(f"{place}{measured['program']}: {measured['calls']} calls in {measured['dtypes']}")
    rows = []
    for form in results["wasm"]["forms"]:
        rows.append([f"`{form}`", *(_shown(measured["forms"][form]) for measured in results.values())])
    return _table(header, rows)


def _shown(form: dict[str, Any]) -> str:
    wrong, refused = len(form["wrong"]), sum(form["refused"].values())
    counts = {"right": form["right"], "refused": refused, "**wrong**": wrong}
    shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    on_webgpu = form["nodes"].get("WebGpuExecutionProvider")
    return (
        shown
        if on_webgpu is None
        else f"{shown}; {on_webgpu:.0%} of the nodes ran on WebGPU, the others on the CPU"
    )


def calls() -> int:
    """Return the number of calls that were run."""
    return int(_read("runtimes.json")["calls"])


def _worst(kind: str, faults: dict[str, str]) -> str:
    """Return the worst fault in the cases of this kind."""
    of_kind = [fault for name, fault in faults.items() if _kind(name) == kind]
    errors = [float(fault.removeprefix("off by ")) for fault in of_kind if fault.startswith("off by ")]
    if "NaN" in of_kind:
        return "NaN"
    if errors:
        return f"off by {max(errors):g}"
    return "refused" if of_kind else "right"


def _kind(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "something else")


def _read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def _table(header: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
