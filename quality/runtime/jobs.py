"""What every release has to get right: ONNX's cases and our own list, with inputs and a judge of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
from feature_calls import DTYPES, features
from internals import Case, ExportCall, judge_outputs, trials
from numpy.typing import NDArray
from short_runs import short_settings

from quality.conformance.onnx_cases import CASES
from quality.conformance.onnx_exports import Export, check_outputs, exports

Outputs: TypeAlias = Mapping[str, NDArray[Any]]
Drawn: TypeAlias = tuple[tuple[Outputs, ...], Callable[[Sequence[Outputs]], str | None]]
"""Inputs for several runs, and what is wrong with the outputs of these runs."""
SEED = 20170612


@dataclass(frozen=True, eq=False)
class Job:
    """A call, inputs for several runs of its graph, and what is wrong with the outputs of these runs."""

    name: str
    call: ExportCall
    draw: Callable[[], Drawn]
    """The inputs, and the judge of the outputs. That takes a float64 reference, which not every test needs."""

    @property
    def feeds(self) -> tuple[Outputs, ...]:
        return self._drawn[0]

    def fault(self, runs: Sequence[Outputs]) -> str | None:
        return self._drawn[1](runs)

    @cached_property
    def _drawn(self) -> Drawn:
        return self.draw()


def jobs() -> list[Job]:
    """All of them, in an order that stays."""
    onnx = [_of_onnx(export) for case in CASES for export in exports(case)]
    return onnx + [job for dtype in DTYPES for job in jobs_of_features(features(dtype), dtype)]


def _of_onnx(export: Export) -> Job:
    def fault(runs: Sequence[Outputs]) -> str | None:
        try:
            check_outputs(export, runs[0])
        except AssertionError as error:
            return str(error).strip().partition("\n")[0] or "other outputs, or of another dtype"
        return None

    return Job(export.name, export.call, lambda: ((export.feeds,), fault))


def jobs_of_features(calls: Mapping[str, ExportCall], dtype: str) -> Iterator[Job]:
    """Calls of our own, with inputs as `sdpa_xp_export.verify` draws them, at a few short lengths."""
    for name, call in calls.items():
        yield Job(f"{name} ({dtype})", call, partial(_drawn, call))


def _drawn(call: ExportCall) -> Drawn:
    rng = np.random.default_rng(SEED)
    tried = list(trials(call, short_settings(call), rng, computed_in=call.accumulation_dtype))
    return tuple(trial.inputs for trial in tried), partial(_fault, call, tried)


def _fault(call: ExportCall, tried: Sequence[Case], runs: Sequence[Outputs]) -> str | None:
    """As `sdpa_xp_export.verify` judges: one bound for all runs."""
    names = [*tried[0].expected]
    if any(list(outputs) != names for outputs in runs):
        return f"the outputs are {', '.join(runs[0])}"
    compared = [trial.compared(outputs) for trial, outputs in zip(tried, runs, strict=True)]
    for name, agreements in judge_outputs(compared, call.accumulation_dtype).items():
        worst = max(agreements, key=lambda agreement: agreement.share)
        if not worst.agrees:
            return f"{name} is off by {worst.absolute:.2g}, may be {worst.bound:.2g}"
    return None
