"""`python -m quality.runtime.standard`: ONNX's own cases of Attention in every release, into
results/conformance.json.

No graph of this project is in it: it is what the releases make of the operator itself, and why the exporter
does not always write it. `make runtimes` runs it too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from internals import EPS, ROUNDINGS
from numpy.typing import NDArray
from onnx.backend.test.case.test_case import TestCase

from quality.conformance import onnx_cases
from quality.runtime.releases import RELEASES, Graph, run_graphs

RESULTS = Path(__file__).parents[2] / "results" / "conformance.json"
IR_VERSION = 10  # onnx writes a later one than old releases load


def cases() -> dict[str, TestCase]:
    """The node tests of Attention by name, without the twins that hold the body of the function."""
    wanted = {case.name for case in onnx_cases.CASES}
    return {test.name: test for test in onnx_cases.node_cases._NodeTestCases if test.name in wanted}


def measured(release: str) -> dict[str, str]:
    """By the name of a case that the release does not compute, what it does instead."""
    tests = cases()
    with tempfile.TemporaryDirectory() as folder:
        results = run_graphs(release, {name: _graph(test) for name, test in tests.items()}, Path(folder))
    faults = {name: _fault(test, results[name]) for name, test in tests.items()}
    return {name: fault for name, fault in sorted(faults.items()) if fault}


def _graph(test: TestCase) -> Graph:
    model, ((inputs, _),) = test.model, test.data_sets
    model.ir_version = IR_VERSION
    return model, [dict(zip((graph_input.name for graph_input in model.graph.input), inputs, strict=True))]


def _fault(test: TestCase, runs: list[Mapping[str, NDArray[Any]]] | str) -> str | None:
    """By the tolerances of ONNX's own runner, or a few roundings of the dtype where that is more."""
    if isinstance(runs, str):
        return runs if "died" in runs else "refused"
    ((_, expected),) = test.data_sets
    for result, exact in zip(runs[0].values(), expected, strict=True):
        one, other = (np.asarray(array, np.float64) for array in (result, exact))
        if np.isnan(one).any():
            return "NaN"
        largest = np.max(np.abs(other[np.isfinite(other)]), initial=0)
        atol = max(test.atol, ROUNDINGS * EPS[exact.dtype.name] * largest)
        if not np.allclose(one, other, rtol=test.rtol, atol=atol):
            with np.errstate(invalid="ignore"):
                return f"off by {np.nanmax(np.abs(one - other)):.1g}"
    return None


def main() -> None:
    """Write the file."""
    releases = {release: measured(release) for release in RELEASES}
    RESULTS.write_text(json.dumps({"cases": len(cases()), "releases": releases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
