"""`make agreement`: each feature on every library, and in every form of a graph, held against the reference.

It writes results/agreement.json; with `--print`, lines of JSON.

Two pages of the site are made of it, the support matrix and the agreement; test_results.py holds it fresh.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from feature_calls import DTYPES
from internals import LIBRARIES, Row, backends, compare, session

from benchmarks import machine
from quality.agreement.features import feature_jobs

RESULTS = Path(__file__).parents[2] / "results" / "agreement.json"
PACKAGES = ("sdpa_xp", "numpy", "onnx", "ml_dtypes")


def measured(dtypes: Sequence[str] = DTYPES, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Machine, versions, and a row for each library and form, with the libraries that were not found."""
    libraries, providers = backends.find_backends(names), session.providers()
    rows = []
    for dtype in dtypes:
        for row in compare(feature_jobs(dtype), dtype, libraries, providers):
            rows.append(rounded(as_json(row)))
            print(row.name, "agrees" if row.agrees else "DISAGREES", file=sys.stderr, flush=True)
    versions = {library.name: library.version for library in libraries} | {"onnxruntime": session.version()}
    absent = [name for name in LIBRARIES if name not in versions]
    return machine.facts(*PACKAGES) | {"libraries": versions, "absent": absent, "rows": rows}


def as_json(row: Row) -> dict[str, Any]:
    """Return a row, what follows from its results, and each result."""
    names = ("backend", "implementation", "dtype", "device", "agrees")
    return {name: getattr(row, name) for name in names} | {
        "jobs": len(row.ran),
        "disagreeing": list(row.disagreeing),
        "worst": None if row.worst is None else asdict(row.worst),
        "seconds": row.seconds,
        "features": [asdict(result) | {"agrees": result.agrees} for result in row.results],
    }


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the rows, and write no file")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="by default all")
    parser.add_argument("--backend", action="append", choices=LIBRARIES, help="by default all that are here")
    arguments = parser.parse_args()
    results = measured(arguments.dtype or DTYPES, arguments.backend)
    if arguments.print:
        print(json.dumps(results["rows"]))
    else:
        RESULTS.write_text(written(results))
    return int(not all(row["agrees"] for row in results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
