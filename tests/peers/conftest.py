"""What the tests of several frameworks have in common."""

from __future__ import annotations

import pytest
from internals import framework_call
from peers.same_layers import count_calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the layers of Flax, Equinox and Keras call sdpa_xp."""
    return count_calls(framework_call, monkeypatch.setattr)
