"""`verify` catches faults that are planted against the way it draws its inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from internals import override

from quality.faults.hostile import hostile
from quality.faults.planted import Fault, planted
from quality.faults.test_planted import by_call, caught, one_draw_for_each_call
from sdpa_xp_export import verify

__all__ = ["one_draw_for_each_call"]
CALLS = by_call(hostile())
"""The faults, those of one call together."""


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these faults shows only in the longest run."""
    override(monkeypatch, "LONGEST_TRIAL", 300)


def test_the_page_says_how_many_are_planted() -> None:
    page = Path(__file__).parents[2] / "docs/how-to/verify.md"
    assert f"all {len(planted()) + sum(map(len, CALLS))} models that tests make wrong" in page.read_text()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("faults", CALLS, ids=lambda faults: faults[0].name)
def test_each_is_caught(faults: list[Fault]) -> None:
    """And the model of the call without a fault agrees."""
    report = verify(faults[0].right())
    assert report.agrees, str(report)
    assert [fault.name for fault in faults if not caught(fault)] == []
