"""CITATION.cff and the changelog name this version."""

from __future__ import annotations

import re
from pathlib import Path

import sdpa_xp

ROOT = Path(__file__).parents[2]


def test_version() -> None:
    assert f"version: {sdpa_xp.__version__}" in (ROOT / "CITATION.cff").read_text().splitlines()


def test_changelog() -> None:
    """Its first heading is this version, with the date of its release if there was one."""
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert re.fullmatch(rf"{re.escape(sdpa_xp.__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", heading[1])
