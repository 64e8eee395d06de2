"""For one release: which form computes which call right, which the exporter refuses, and which is wrong."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.jobs import Job
from runtime.releases import Graph, run_graphs

from sdpa_xp_export.choice import choose, refusal
from sdpa_xp_export.export import export_call
from sdpa_xp_export.runtime import Runtime


@dataclass(slots=True)
class Outcome:
    """How one form did over all calls."""

    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """The exporter's reasons, and for how many calls it gave them."""
    wrong: dict[str, str] = field(default_factory=dict)
    """By the name of a call, what is wrong with it."""


def runtime_of(release: str) -> str:
    """`1.28.0` -> the runtime that a graph for this release and the CPU is exported with."""
    return f"onnxruntime>={'.'.join(release.split('.')[:2])};cpu"


def refusals(release: str, form: str, jobs: Sequence[Job]) -> Counter[str]:
    """Why the exporter refuses the form for this release, and how many of the calls."""
    target = Runtime.parse("runtime", runtime_of(release))
    return Counter(filter(None, (refusal(form, job.call, target) for job in jobs)))


def choices(release: str, jobs: Sequence[Job]) -> dict[str, str]:
    """The form that the exporter chooses for each call."""
    target = Runtime.parse("runtime", runtime_of(release))
    return {job.name: choose("runtime", job.call, "auto", None, target)[0] for job in jobs}


def outcomes(release: str, forms: Sequence[str], jobs: Sequence[Job]) -> dict[str, Outcome]:
    """By form, how it did in `release`; "auto" is whichever form the exporter chooses."""
    target = Runtime.parse("runtime", runtime_of(release))
    chosen = choices(release, jobs)
    found = {form: Outcome() for form in forms}
    graphs: dict[tuple[str, str], Graph] = {}
    asked: list[tuple[str, str, Job]] = []
    for job in jobs:
        for form in forms:
            made = chosen[job.name] if form == "auto" else form
            if why := refusal(made, job.call, target):
                found[form].refused[why] += 1
                continue
            asked.append((form, made, job))
            if (made, job.name) not in graphs:
                graphs[made, job.name] = export_call(job.call, form=made, runtime=str(target)), job.feeds
    with tempfile.TemporaryDirectory() as folder:
        results = run_graphs(release, graphs, Path(folder))
    for form, made, job in asked:
        result = results[made, job.name]
        fault = result if isinstance(result, str) else job.fault(result)
        if fault is None:
            found[form].right += 1
        else:
            found[form].wrong[job.name] = fault
    return found
