"""`verify` catches the faults that are planted into models, and agrees with the models without them.

`PYTHONPATH=tests python -m faults.test_planted` prints the count of each class.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from faults.planted import KINDS, Fault, planted

from sdpa_xp_export import verify
from sdpa_xp_export._call.metadata import to_json

module: Any = importlib.import_module("sdpa_xp_export.verify")

MISSED: dict[str, str] = {}
"""The faults that are not caught, with the reason."""


@pytest.fixture(autouse=True)
def one_draw_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the inputs of a call, and compute what they give, once for all models of it."""
    draw, kept = module.trials, {}

    def trials(call: Any, settings: Any, rng: Any, **options: Any) -> list[Any]:
        key = repr((to_json(call), settings, options))
        if key not in kept:
            kept.clear()  # faults of one call follow each other
            kept[key] = list(draw(call, settings, rng, **options))
        return kept[key]

    monkeypatch.setattr(module, "trials", trials)


def by_call(faults: list[Fault]) -> Iterator[Fault]:
    """Faults of one call, one after the other."""
    yield from sorted(
        faults, key=lambda fault: next(e.value for e in fault.right().metadata_props if "call" in e.key)
    )


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
    assert len(faults) > 150
    assert len({(fault.kind, fault.name) for fault in faults}) == len(faults)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_is_caught(kind: Any) -> None:
    faults = list(kind())
    missed = [fault.name for fault in by_call(faults) if not caught(fault)]
    assert set(missed) == {fault.name for fault in faults} & MISSED.keys()


def test_nearly_all_are_caught() -> None:
    assert len(MISSED) <= 0.03 * len(planted())


def test_a_model_without_a_fault_agrees() -> None:
    """One model of each call and form."""
    right = {
        (model.metadata_props[1].value, fault.name.partition(":")[0]): model
        for fault in planted()
        if (model := fault.right())
    }
    for _, model in sorted(right.items(), key=lambda item: item[0]):
        report = verify(model)
        assert report.agrees, str(report)


if __name__ == "__main__":
    for name, count in Counter(fault.kind for fault in planted()).items():
        print(f"{count:4} {name}")
