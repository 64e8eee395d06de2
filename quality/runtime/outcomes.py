"""The graphs that are written for some releases, run in one of them: which are wrong there, and how.

`runtime` names the oldest release that has to compute a graph right. So a graph runs in the release that it is
written for and in each later one.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import onnx
from internals import Runtime

from quality.runtime.jobs import Job
from quality.runtime.releases import run_graphs
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import choose, unsupported_reason


class Graph(NamedTuple):
    """What is run: one graph for a call. Two releases that get the same bytes for a call share one."""

    job: Job
    model: bytes


@dataclass(slots=True)
class Exported:
    """What the exporter made of all calls, in one form and for one release."""

    graphs: list[Graph] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """The exporter's reasons, and for how many calls it gave them."""


Exports: TypeAlias = Mapping[str, Mapping[str, Exported]]
"""By the release that graphs are for, and by form."""


def number(release: str) -> tuple[int, ...]:
    """`1.28.0` -> (1, 28, 0)."""
    return tuple(map(int, release.split(".")))


def runtime_of(release: str) -> str:
    """`1.28.0` -> the runtime that a graph for this release and the CPU is exported with."""
    return f"onnxruntime>={'.'.join(release.split('.')[:2])};cpu"


def refusals(release: str, form: str, jobs: Sequence[Job]) -> Counter[str]:
    """Why the exporter refuses the form for this release, and how many of the calls."""
    target = Runtime.parse("runtime", runtime_of(release))
    return Counter(filter(None, (unsupported_reason(form, job.call, target) for job in jobs)))


def choices(release: str, jobs: Sequence[Job]) -> dict[str, str]:
    """The form that the exporter chooses for each call."""
    target = Runtime.parse("runtime", runtime_of(release))
    return {job.name: choose("runtime", job.call, "auto", None, target)[0] for job in jobs}


def exports(
    releases: Sequence[str], forms: Sequence[str], jobs: Sequence[Job], opset: int | None = None
) -> Exports:
    """The graphs of all calls, for each of the releases and in each form."""
    return {release: {form: _exported(release, form, jobs, opset) for form in forms} for release in releases}


def faults(release: str, by_release: Exports) -> dict[Graph, str]:
    """Run in `release` each graph that is written for it or an older one; those that are wrong, and how."""
    graphs = list(dict.fromkeys(_meant_for(release, by_release)))
    with tempfile.TemporaryDirectory() as folder:
        models = {graph: (onnx.load_from_string(graph.model), graph.job.feeds) for graph in graphs}
        results = run_graphs(release, models, Path(folder))
    faulty = {}
    for graph, result in results.items():
        fault = result if isinstance(result, str) else graph.job.fault(result)
        if fault is not None:
            faulty[graph] = fault
    return faulty


def wrong(
    by_release: Exports, faults_in: Mapping[str, Mapping[Graph, str]]
) -> dict[str, dict[str, dict[str, str]]]:
    """By the release that graphs are for and by form, the calls that are wrong, there or in a later release.

    `faults_in` holds the faults by the release that the graphs ran in.
    """
    listed: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for target, of_target in by_release.items():
        later = [release for release in faults_in if number(release) >= number(target)]
        for form, exported in of_target.items():
            listed[target][form] = {
                graph.job.name: "; ".join(f"{release}: {faults_in[release][graph]}" for release in bad)
                for graph in exported.graphs
                if (bad := [release for release in later if graph in faults_in[release]])
            }
    return dict(listed)


def _meant_for(release: str, by_release: Exports) -> Iterator[Graph]:
    for target, of_target in by_release.items():
        if number(target) <= number(release):
            for exported in of_target.values():
                yield from exported.graphs


def _exported(release: str, form: str, jobs: Sequence[Job], opset: int | None) -> Exported:
    target, exported = Runtime.parse("runtime", runtime_of(release)), Exported()
    for job in jobs:
        if why := unsupported_reason(form, job.call, target):
            exported.refused[why] += 1
            continue
        model = export_call(job.call, form=form, opset=opset, runtime=str(target))
        del model.metadata_props[:]  # they name the release, so that no two graphs would be alike
        exported.graphs.append(Graph(job, model.SerializeToString(deterministic=True)))
    return exported
