"""A model against the reference at a few short lengths: what `verify` does, in less time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from internals import (
    LARGE,
    PROVIDERS,
    READERS,
    SESSIONS,
    CallLengths,
    Case,
    ExportCall,
    StatedModel,
    TimedRun,
    check_interface,
    computed_dtype,
    engine,
    judge_outputs,
    metadata_of,
    open_session,
    override,
    process,
    providers,
    run_session,
    stated_call,
    trials,
    version,
)

MOST_KEPT = 16
KEPT: dict[tuple[Any, ...], list[Case]] = {}
"""What was drawn for the last calls. The models of a call, in several forms and opsets, follow each other."""


def short_settings(call: ExportCall) -> list[Case]:
    """A few settings of small lengths, for quick runs over many calls."""
    small = CallLengths.for_call(call).small()
    return [Case(lengths, size) for size in (1.0, LARGE) for lengths in small]


def assert_right(
    model: onnx.ModelProto,
    *,
    seed: int = 0,
    session: Any = None,
    engine_name: str = "onnxruntime",
    **functions: Any,
) -> None:
    """Run a model on the CPU at three lengths, with scores of ordinary size and with large ones.

    `functions` are the mask and the bias that its metadata cannot hold. A session of onnxruntime may be open.
    """
    call = stated_call(StatedModel.from_model(model), functions)
    check_interface(model, call)
    computed_in = computed_dtype(model, call, engine.element_types)
    key = metadata_of(model)["sdpa_xp.digest"], computed_in, seed, *functions.values()
    drawn = KEPT.pop(key, None)
    if drawn is None:
        rng = np.random.default_rng(seed)
        drawn = list(trials(call, short_settings(call), rng, computed_in=computed_in))
    KEPT[key] = drawn
    if len(KEPT) > MOST_KEPT:
        del KEPT[next(iter(KEPT))]
    session = session_in(engine_name, model, PROVIDERS["cpu"]) if session is None else opened(session)
    compared = [trial.compared(run_session(session, trial.inputs)) for trial in drawn]
    for name, agreements in judge_outputs(compared, computed_in).items():
        for trial, agreement in zip(drawn, agreements, strict=True):
            assert agreement.agrees, (name, trial.shown, agreement)
            if name == "output" and "large" not in trial.shown and computed_in == call.query.dtype:
                assert agreement.bound < 1e-4, (trial.shown, agreement)  # no bound that says nothing


def agreed(report: Any) -> Any:
    """The report of a model that agrees."""
    assert report.agrees, str(report)
    return report


def session_in(engine_name: str, model: onnx.ModelProto, provider: str) -> Any:
    """A session of the model in onnxruntime or in another engine."""
    if engine_name not in READERS:
        return open_session(model, provider)
    return READERS[engine_name](model.SerializeToString(), [output.name for output in model.graph.output])


def opened(inner: Any) -> Any:
    """What the exporter makes of a session of onnxruntime."""
    session: Any = object.__new__(SESSIONS["onnxruntime"])
    session.inner = inner
    return session


class UntimedSession:
    """A session that runs once, and does not say where: other tests ask for times and places."""

    def __init__(self, run: Callable[[Any], Any], math_mode: str) -> None:
        self.run, self.placements, self.math_mode = run, (), math_mode

    def timed(self, feeds: Any, *, frees: bool = False) -> TimedRun:
        del frees
        return TimedRun(self.run(feeds), 0.0, None)


class UntimedRuntime:
    """An engine in the process of the tests, for models that are trusted."""

    notes = ()
    element_types = staticmethod(engine.element_types)

    def __init__(self, name: str) -> None:
        self.engine, self.reader = name, READERS.get(name)
        self.version = version() if self.reader is None else self.reader.version()

    def providers(self, requested: str | None) -> list[str]:
        return providers(requested) if self.reader is None else [self.reader.label]

    @contextmanager
    def session(self, model: Any, provider: str) -> Iterator[UntimedSession]:
        session = session_in(self.engine, model, provider)
        yield UntimedSession(partial(run_session, session), session.math_mode)


@contextmanager
def untimed_runtime(
    *_arguments: object, engine: str = "onnxruntime", **_limits: object
) -> Iterator[UntimedRuntime]:
    yield UntimedRuntime(engine)


def run_models_by(monkeypatch: pytest.MonkeyPatch, runtime: Callable[..., Any]) -> None:
    """Let `verify` and `verify_layer` use this in the place of `runtime_process`."""
    override(monkeypatch, "runtime_process", runtime)


def run_each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` and `verify_layer` take no times, and start no process."""
    run_models_by(monkeypatch, untimed_runtime)


@contextmanager
def one_process() -> Iterator[Callable[..., Any]]:
    """Give what stands in for `runtime_process`: one process for all models, since its start takes the longest.

    A call with a limit of its own gets a process of its own.
    """
    fresh = process.runtime_process
    with ExitStack() as opened:
        started: list[Any] = []

        @contextmanager
        def runtime(
            model: Any, timeout: float = process.TIMEOUT, memory: Any = None, **more: Any
        ) -> Iterator[Any]:
            of_another = more.get("engine", "onnxruntime") != "onnxruntime"
            if memory is not None or timeout != process.TIMEOUT or of_another:
                with fresh(model, timeout, memory, **more) as own_process:
                    yield own_process
                return
            if not started or started[0]._process.poll() is not None:
                started[:] = [opened.enter_context(fresh(model, **more))]
            shared = started[0]
            shared._hello, shared._left, shared.notes = None, timeout, ()  # as of one that has just started
            yield shared

        yield runtime


def leave_out_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` and `verify_layer` try long lengths only around the numbers of a call, and few at random."""
    override(monkeypatch, "RANDOM_RANGES", ((10, 130, 2),))
    override(monkeypatch, "DRAWS_FOR_A_LAYER", 1)
    override(monkeypatch, "LONGEST_TRIAL", 300)
    override(monkeypatch, "OTHER_SIZES", ((64, 64), (150, 161, 7)))
    override(monkeypatch, "LONG_LAYER_TRIAL", (33, 40))


def try_short_lengths_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` try a model as `assert_right` does: for tests that ask what is written of it."""
    module = importlib.import_module("sdpa_xp_export.verify")
    monkeypatch.setattr(module, "planned_cases", lambda call, *_, **__: short_settings(call))
