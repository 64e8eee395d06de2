"""`python -m runtime.matrix`: every form of every call in every release, into results.json and RESULTS.md.

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

from runtime.jobs import jobs
from runtime.outcomes import choices, outcomes
from runtime.releases import RELEASES, path_of
from runtime.table import markdown

from sdpa_xp_export.choice import FORMS

RESULTS = Path(__file__).with_name("results.json")
TABLE = Path(__file__).with_name("RESULTS.md")
PACKAGES = ("numpy", "onnx", "sdpa_xp")


def measured() -> dict[str, Any]:
    """What goes into results.json."""
    calls = jobs()
    for release in RELEASES:
        path_of(release)
    releases: dict[str, Any] = {}
    for release in RELEASES:
        chosen = list(choices(release, calls).values())
        forms = {}
        for form, outcome in outcomes(release, list(FORMS), calls).items():
            refused = dict(sorted(outcome.refused.items()))
            forms[form] = {"right": outcome.right, "refused": refused, "wrong": outcome.wrong}
            print(f"{release} {form}: {outcome.right} right, {len(outcome.wrong)} wrong", flush=True)
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
    """Write the files; 1 if something is wrong."""
    results = measured()
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    TABLE.write_text(markdown(results))
    print(f"wrote {RESULTS} and {TABLE}")
    found = [form for release in results["releases"].values() for form in release["forms"].values()]
    return int(any(form["wrong"] for form in found))


if __name__ == "__main__":
    sys.exit(main())
