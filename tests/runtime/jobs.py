"""What every release has to get right: ONNX's cases and our own list, with inputs and a judge of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from conformance.onnx_cases import CASES
from conformance.onnx_exports import Export, check_outputs, exports
from numpy.typing import NDArray
from runtime.features import DTYPES, features

from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._verify.trial_settings import short_settings
from sdpa_xp_export._verify.trials import Trial, judge, outcome, trials

Outputs: TypeAlias = Mapping[str, NDArray[Any]]
SEED = 20170612


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A call, inputs for several runs of its graph, and what is wrong with the outputs of these runs."""

    name: str
    call: ExportCall
    feeds: tuple[Outputs, ...]
    fault: Callable[[Sequence[Outputs]], str | None]


def jobs() -> list[Job]:
    """All of them, in an order that stays."""
    onnx = [_of_onnx(export) for case in CASES for export in exports(case)]
    return onnx + [job for dtype in DTYPES for job in own(features(dtype), dtype)]


def _of_onnx(export: Export) -> Job:
    def fault(runs: Sequence[Outputs]) -> str | None:
        try:
            check_outputs(export, runs[0])
        except AssertionError as error:
            return str(error).strip().partition("\n")[0] or "other outputs, or of another dtype"
        return None

    return Job(export.name, export.call, (export.feeds,), fault)


def own(calls: Mapping[str, ExportCall], dtype: str) -> Iterator[Job]:
    """Calls of our own, with inputs as `sdpa_xp_export.verify` draws them, at a few short lengths."""
    for name, call in calls.items():
        computed_in = call.accumulation_dtype
        rng = np.random.default_rng(SEED)
        tried = list(trials(call, short_settings(call), rng, computed_in=computed_in))
        feeds = tuple(trial.inputs for trial in tried)
        yield Job(f"{name} ({dtype})", call, feeds, partial(_fault, call, tried))


def _fault(call: ExportCall, tried: Sequence[Trial], runs: Sequence[Outputs]) -> str | None:
    """As `sdpa_xp_export.verify` judges: one bound for all runs."""
    names = [*tried[0].expected, *tried[0].copies]
    if any(list(outputs) != names for outputs in runs):
        return f"the outputs are {', '.join(runs[0])}"
    outcomes = [outcome(call, trial, outputs) for trial, outputs in zip(tried, runs, strict=True)]
    for name, agreements in judge(call, outcomes, call.accumulation_dtype).items():
        worst = max(agreements, key=lambda agreement: agreement.share)
        if not worst.agrees:
            return f"{name} is off by {worst.absolute:.2g}, may be {worst.bound:.2g}"
    return None
