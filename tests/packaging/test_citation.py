"""CITATION.cff is of this version."""

from __future__ import annotations

from pathlib import Path

import sdpa_xp

CITATION = Path(__file__).parents[2] / "CITATION.cff"


def test_version() -> None:
    assert f"version: {sdpa_xp.__version__}" in CITATION.read_text().splitlines()
