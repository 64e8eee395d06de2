"""Run the cases of a model in an engine, judge each output of all runs together, and say what ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._files.metadata import exported_models, recorded_verdict
from .._files.model import Model
from .._runtime.limits import check_time
from .._runtime.process import RemoteSession, RuntimeProcess
from .._runtime.releases import ENGINES, runtime_notes, stated_runtimes
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
    process: RuntimeProcess,
    model: Model,
    providers: Iterable[str],
    cases: Callable[[], Iterable[Trial | LayerCase]],
    judge: Callable[[list[Outcome], str], Iterable[Run]],
    done: Callable[[str], object] = str,
) -> tuple[tuple[Run, ...], dict[str, Any]]:
    """Run a model on each provider; return the runs, and what a report says of the model and the engine.

    Args:
        process: The process of the engine.
        model: The model.
        providers: The providers, by their full names.
        cases: Returns the inputs of each run, which are the same for each provider.
        judge: Returns the runs of the outcomes on a provider.
        done: A function that is told of each run.
    """
    runs: list[Run] = []
    sessions: dict[str, RemoteSession] = {}
    for name in providers:
        outcomes = []
        with process.session(model, name) as session:
            sessions[name] = session
            for case in cases():
                # To free memory takes time, so runs with few scores keep it for the next.
                run = session.timed(case.inputs, frees=case.has_many_scores)
                done(f"{case.shown} on {name}")
                outcomes.append(Outcome(case.shown, case.compared(run.outputs), run.seconds, run.peak_bytes))
        check_time()
        runs += judge(outcomes, name)
    return tuple(runs), _facts_of_run(model, process, sessions)


def judged(outcomes: Sequence[Outcome], provider: str, computed_in: str | None = None) -> Iterator[Run]:
    """Yield a run for each output and case, by one bound for all cases of an output."""
    for name, agreements in judge_outputs([case.outputs for case in outcomes], computed_in).items():
        for case, agreement in zip(outcomes, agreements, strict=True):
            compared = case.outputs[name]
            measures = (case.seconds, case.peak_bytes, *compared.counts, compared.where(agreement.index))
            yield Run(case.shown, provider, name, agreement, *measures)


def _facts_of_run(
    model: Model, runtime: RuntimeProcess, sessions: Mapping[str, RemoteSession]
) -> dict[str, Any]:
    """Return what a report says of a model, and of the runtime that ran it in a session for each provider."""
    chosen = [choice for exported in exported_models(model) for choice in exported.chosen]
    forms, reasons = (dict.fromkeys(choice[part] for choice in chosen) for part in (0, 1))
    notes = runtime_notes(model, runtime.version, sessions, runtime.engine, is_finished=True)
    notes += tuple(filter(None, [recorded_verdict(model)]))
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
