"""Run the cases of a model in an engine, judge each output of all runs together, and say what ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._files.metadata import exported_models
from .._files.model import Model
from .._runtime.process import RemoteSession, RuntimeProcess
from .._runtime.releases import ENGINES
from .._runtime.session import not_run_notes, runtime_notes, stated_runtimes
from ..report import Run
from .judging import Compared, judge_outputs
from .layer import LayerCase
from .trials import Trial


class Outcome(NamedTuple):
    """What is compared of the outputs of one run, by name, its seconds, and its peak of memory in bytes."""

    shown: str
    outputs: Mapping[str, Compared]
    seconds: float
    peak_bytes: int | None


def run_cases(
    session: RemoteSession, cases: Iterable[Trial | LayerCase], done: Callable[[str], object] = str
) -> list[Outcome]:
    """Run a model on each of the inputs; `done` is told of each run."""
    outcomes = []
    for case in cases:
        # To free memory takes time, so runs with few scores keep it for the next.
        run = session.timed(case.inputs, frees=case.has_many_scores)
        done(case.shown)
        outcomes.append(Outcome(case.shown, case.compared(run.outputs), run.seconds, run.peak_bytes))
    return outcomes


def judged(outcomes: Sequence[Outcome], provider: str, computed_in: str | None = None) -> Iterator[Run]:
    """Yield a run for each output and case, by one bound for all cases of an output."""
    for name, agreements in judge_outputs([case.outputs for case in outcomes], computed_in).items():
        for case, agreement in zip(outcomes, agreements, strict=True):
            compared = case.outputs[name]
            measures = (case.seconds, case.peak_bytes, *compared.counts, compared.where(agreement.index))
            yield Run(case.shown, provider, name, agreement, *measures)


def facts_of_run(
    model: Model, runtime: RuntimeProcess, sessions: Mapping[str, RemoteSession]
) -> dict[str, Any]:
    """Return what a report says of a model, and of the runtime that ran it in a session for each provider."""
    chosen = [choice for exported in exported_models(model) for choice in exported.chosen]
    forms, reasons = (dict.fromkeys(choice[part] for choice in chosen) for part in (0, 1))
    notes = runtime_notes(model, runtime.version, sessions, runtime.engine)
    if runtime.engine == "onnxruntime":
        notes += not_run_notes(model, sessions)
    return {
        "form": ", ".join(forms),
        "reason": "; ".join(reasons),
        "onnxruntime": runtime.version if runtime.engine == "onnxruntime" else "",
        "engine": f"{ENGINES[runtime.engine]} {runtime.version}",
        "notes": (*runtime.notes, *notes),
        "placements": tuple(placed for session in sessions.values() for placed in session.placements),
        "runtime": ", ".join(map(str, stated_runtimes(model))),
        "math_mode": " and ".join(dict.fromkeys(session.math_mode for session in sessions.values())),
    }
