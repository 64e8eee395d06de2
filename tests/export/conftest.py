"""What several files of tests of the exporter set."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 2 queries, the last of them smaller."""
    monkeypatch.setattr("sdpa_xp_export.forms.tiled.ROWS", 2)
