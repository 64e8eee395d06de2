"""Where the heads stand: `layout="...LHE"` is the same call with two axes swapped."""

from __future__ import annotations

import numpy as np
import pytest
from calls import draw_named, moved
from libraries import Library

from sdpa_xp import scaled_dot_product_attention


@pytest.fixture
def call(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"query": (2, 4, 7, 8), "key": (2, 2, 11, 8), "value": (2, 2, 11, 5)}
    return draw_named(rng, shapes)


def test_2d_has_no_heads_to_move(library: Library, call: dict[str, np.ndarray]) -> None:
    flat = {name: x[0, 0] for name, x in call.items()}
    one, other = (
        library.call(scaled_dot_product_attention, **flat, layout=layout) for layout in ("...HLE", "...LHE")
    )
    assert one.shape == other.shape == (7, 5)
    np.testing.assert_array_equal(library.get(one), library.get(other))


def test_inputs_are_not_copied(call: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values that reach the products are views of the caller's."""
    from internals import scores, softmax

    monkeypatch.setenv("SDPA_XP_NUM_THREADS", "1")  # so that keys and values take turns
    shared: list[np.ndarray] = []
    for module in (scores, softmax):
        product = module.matmul_grouped
        monkeypatch.setattr(
            module,
            "matmul_grouped",
            lambda xp, rows, x, *buffer, product=product: shared.append(x) or product(xp, rows, x, *buffer),
        )
    for length in (call["key"].shape[-2], 300):
        longer = {name: np.resize(x, (*x.shape[:-2], length, x.shape[-1])) for name, x in call.items()}
        arrays = {name: moved(x, "...LHE") for name, x in longer.items()}
        shared.clear()
        scaled_dot_product_attention(**arrays, layout="...LHE")
        assert len(shared) > 1
        assert all(np.shares_memory(x, arrays["key"]) for x in shared[::2])
        assert all(np.shares_memory(x, arrays["value"]) for x in shared[1::2])
