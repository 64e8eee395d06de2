"""`python -m quality.runtime.matrix`: every form of every call, for every release, into results/runtimes.json.

Each graph runs in the release that it is written for and in each later one, since `runtime` names the oldest.

`make runtimes` installs the releases and runs it. test_matrix.py runs a part of it with every change.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quality.runtime.jobs import jobs
from quality.runtime.outcomes import choices, exports, faults, wrong
from quality.runtime.releases import RELEASES, path_of
from sdpa_xp_export.forms.choice import FORMS

FOLDER = Path(__file__).parents[2] / "results"
RESULTS = FOLDER / "runtimes.json"
PACKAGES = ("numpy", "onnx", "sdpa_xp")


def measured() -> dict[str, Any]:
    """What goes into runtimes.json."""
    calls = jobs()
    for release in RELEASES:
        path_of(release)
    graphs = exports(RELEASES, list(FORMS), calls)
    faults_in = {}
    for release in RELEASES:
        faults_in[release] = faults(release, graphs)
        print(f"{release}: {len(faults_in[release])} graphs are wrong", flush=True)
    listed = wrong(graphs, faults_in)
    releases: dict[str, Any] = {}
    for release in RELEASES:
        chosen = list(choices(release, calls).values())
        forms = {
            form: {
                "right": len(exported.graphs) - len(listed[release][form]),
                "refused": dict(sorted(exported.refused.items())),
                "wrong": listed[release][form],
            }
            for form, exported in graphs[release].items()
        }
        releases[release] = {"auto": {form: chosen.count(form) for form in FORMS}, "forms": forms}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(name) for name in PACKAGES},
        "calls": len(calls),
        "releases": releases,
    }


def main() -> int:
    """Write the file; 1 if something is wrong."""
    results = measured()
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(f"wrote {RESULTS}")
    forms = [form for release in results["releases"].values() for form in release["forms"].values()]
    return int(any(form["wrong"] for form in forms))


if __name__ == "__main__":
    sys.exit(main())
