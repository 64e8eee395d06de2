"""What the tests of several frameworks have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from internals import framework_call
from peers.same_layers import count_calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the layers of Flax, Equinox and Keras call sdpa_xp."""
    return count_calls(framework_call, monkeypatch.setattr)


@pytest.fixture(scope="module")
def whole_precision() -> Iterator[None]:
    """JAX's products in float32, and little optimizing: compiling is most of the time."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    with jax.default_matmul_precision("float32"):
        yield
