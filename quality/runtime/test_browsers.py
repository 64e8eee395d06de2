"""results/browsers.json is of this code: if a call is added or refused, `make runtimes` measures again."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from browsers import use_wasm
from internals import PROVIDERS

from quality.runtime.browsers import NAMES, RESULTS, calls_of, computed, refusals
from sdpa_xp_export.forms.choice import FORMS


def test_the_results_are_of_this_code() -> None:
    results = json.loads(RESULTS.read_text())
    assert [*results] == [*NAMES]
    for name, of_provider in results.items():
        calls = calls_of(name)
        assert of_provider["calls"] == len(calls)
        assert [*of_provider["forms"]] == [*FORMS]
        for form, outcome in of_provider["forms"].items():
            assert outcome["refused"] == refusals(name, form, calls)
            assert not outcome["wrong"]
            assert outcome["right"] == len(calls) - sum(outcome["refused"].values())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_short_list_on_wasm(form: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """With `--thin`, one of thirty calls."""
    use_wasm(monkeypatch)
    ran = Counter[str]()
    calls = calls_of("wasm")[:: 30 if pytestconfig.getoption("--thin") else 1]
    refused = refusals("wasm", form, calls).total()
    faults = [computed("wasm", form, job, ran) for job in calls if not refusals("wasm", form, [job])]
    assert len(faults) == len(calls) - refused
    assert not any(faults), faults
    assert {*ran} <= {PROVIDERS["wasm"]}
