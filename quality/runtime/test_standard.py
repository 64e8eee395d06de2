"""What results/conformance.json says of the releases is what they do."""

from __future__ import annotations

import json

import pytest

from quality.runtime.releases import REDUCED, RELEASES
from quality.runtime.standard import RESULTS, cases, measured

FOUND = json.loads(RESULTS.read_text())


def test_it_is_of_all_releases_and_cases() -> None:
    assert list(FOUND["releases"]) == list(RELEASES)
    assert FOUND["cases"] == len(cases()) == 93


@pytest.mark.sampled(2)
@pytest.mark.parametrize("release", REDUCED)
def test_a_release_computes_the_cases_that_are_not_named(release: str) -> None:
    """How far it is off may differ between machines."""
    kinds = (
        {name: fault.partition(" by ")[0] for name, fault in faults.items()}
        for faults in (measured(release), FOUND["releases"][release])
    )
    assert next(kinds) == next(kinds)
