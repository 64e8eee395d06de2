"""`verify` catches the faults that are planted into models, and agrees with the models without them.

`PYTHONPATH=tests python -m quality.faults.test_planted` prints the count of each class.
"""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from internals import to_json
from short_runs import run_each_model_once

from quality.faults.planted import Fault, planted
from sdpa_xp_export import verify

module: Any = importlib.import_module("sdpa_xp_export.verify")

PARTS, SAMPLED = 14, 7
"""The calls are dealt out to so many tests, of which `--thin` keeps each seventh."""
MISSED: dict[str, str] = {}
"""The faults that are not caught, with the reason."""


@pytest.fixture(autouse=True)
def one_draw_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the inputs of a call, and compute what they give, once for all models of it; run each model once."""
    draw, kept = module.drawn_cases, {}

    def trials(call: Any, settings: Any, rng: Any, **options: Any) -> list[Any]:
        key = repr((to_json(call), settings, options))
        if key not in kept:
            kept.clear()  # models of one call follow each other
            kept[key] = list(draw(call, settings, rng, **options))
        return kept[key]

    monkeypatch.setattr(module, "drawn_cases", trials)
    run_each_model_once(monkeypatch)


def by_call(faults: Iterable[Fault]) -> list[list[Fault]]:
    """The faults of each call, which are those of one form after those of another."""
    faults_of = defaultdict(list)
    for fault in faults:
        faults_of[next(e.value for e in fault.right().metadata_props if "call" in e.key)].append(fault)
    return [sorted(of_call, key=form_of) for _, of_call in sorted(faults_of.items())]


@cache
def calls() -> list[list[Fault]]:
    """All faults, by call."""
    return by_call(planted())


def form_of(fault: Fault) -> str:
    return fault.name.partition(":")[0]


def caught(fault: Fault) -> bool:
    """A model that onnxruntime cannot run is no fault that `verify` has caught."""
    try:
        return not verify(fault.wrong()).agrees
    except ValueError as error:
        if "onnxruntime must" in str(error):
            raise
        return True


def test_there_are_many() -> None:
    faults = planted()
    assert len(faults) > 200
    assert len({(fault.kind, fault.name) for fault in faults}) == len(faults)


@pytest.mark.slow
@pytest.mark.sampled(SAMPLED)
@pytest.mark.parametrize("part", range(PARTS))
def test_each_is_caught_and_no_right_model(part: int) -> None:
    for faults in calls()[part::PARTS]:
        right = {form_of(fault): fault.right for fault in faults}
        for form, model in right.items():
            report = verify(model())
            assert report.agrees, str(report)
            of_form = [fault for fault in faults if form_of(fault) == form]
            missed = {fault.name for fault in of_form if not caught(fault)}
            assert missed == {fault.name for fault in of_form} & MISSED.keys()


def test_a_sample_has_faults_of_each_kind() -> None:
    sample = {
        fault.kind for part in range(0, PARTS, SAMPLED) for faults in calls()[part::PARTS] for fault in faults
    }
    assert sample == {fault.kind for fault in planted()}


def test_nearly_all_are_caught() -> None:
    assert len(MISSED) <= 0.03 * len(planted())


if __name__ == "__main__":
    for name, count in Counter(fault.kind for fault in planted()).items():
        print(f"{count:4} {name}")
