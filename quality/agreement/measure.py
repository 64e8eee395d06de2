"""`make agreement`: what `sdpa-xp agree` says here of every feature.

It writes results/agreement.json.

Two pages of the site are made of it, the support matrix and the agreement; test_results.py holds it fresh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from internals import LIBRARIES, backends, compare, feature_jobs, session

from benchmarks import machine
from sdpa_xp_export.cli.compare import DTYPES

RESULTS = Path(__file__).parents[2] / "results" / "agreement.json"
PACKAGES = ("sdpa_xp", "numpy", "onnx", "ml_dtypes")


def measured() -> dict[str, Any]:
    """Machine, versions, and each row of `sdpa-xp agree`, with the libraries that were not found."""
    libraries, providers = backends.find_backends(), session.providers()
    rows = []
    for dtype in DTYPES:
        for row in compare(feature_jobs(dtype), dtype, libraries, providers):
            rows.append(rounded(row.as_json()))
            print(
                row.backend, row.implementation, row.dtype, "agrees" if row.agrees else "DISAGREES", flush=True
            )
    versions = {library.name: library.version for library in libraries} | {"onnxruntime": session.version()}
    absent = [name for name in LIBRARIES if name not in versions]
    return machine.facts(*PACKAGES) | {"libraries": versions, "absent": absent, "rows": rows}


def rounded(value: Any) -> Any:
    """Numbers to three digits, which is what the pages show."""
    if isinstance(value, Mapping):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def written(results: Mapping[str, Any]) -> str:
    """JSON with a line a result, so that a change is seen."""
    rows = []
    for row in results["rows"]:
        features = ",\n    ".join(json.dumps(feature) for feature in row["features"])
        head = json.dumps({name: value for name, value in row.items() if name != "features"})
        rows.append(f'  {head[:-1]}, "features": [\n    {features}]}}')
    head = json.dumps({name: value for name, value in results.items() if name != "rows"})
    return f'{head[:-1]}, "rows": [\n' + ",\n".join(rows) + "]}\n"


def main() -> int:
    """Write the file; 1 if something disagrees."""
    results = measured()
    RESULTS.write_text(written(results))
    return int(not all(row["agrees"] for row in results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
