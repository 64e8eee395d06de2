"""Where the heads stand: `layout="...LHE"` is the same call with two axes swapped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import draw_named
from libraries import Library

from sdpa_xp import attention_scores, attention_state, attention_weights, scaled_dot_product_attention

F = np.float32
NAMES = ("query", "key", "value")


@pytest.fixture
def call(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"query": (2, 4, 7, 8), "key": (2, 2, 11, 8), "value": (2, 2, 11, 5)}
    return draw_named(rng, shapes)


def swapped(call: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As a user of that layout holds them, contiguous."""
    return {
        name: np.ascontiguousarray(np.swapaxes(x, -2, -3)) if name in NAMES else x for name, x in call.items()
    }


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rules", [{}, {"is_causal": True, "softcap": 2.0}], ids=["plain", "causal, softcap"])
def test_output_and_state(library: Library, call: dict[str, np.ndarray], rules: Any) -> None:
    """Masks, biases and the log-sum-exp stay (..., Hq, L, S) and (..., Hq, L)."""
    rng = np.random.default_rng(0)
    call |= {"attn_mask": rng.random((2, 1, 7, 11)) < 0.7, "bias": rng.standard_normal((4, 7, 11)).astype(F)}
    expected = library.call(attention_state, **call, **rules)
    state = library.call(attention_state, **swapped(call), **rules, layout="...LHE")
    assert state.output.shape == (2, 7, 4, 5)
    np.testing.assert_allclose(
        library.get(state.output), np.swapaxes(library.get(expected.output), -2, -3), rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(library.get(state.lse), library.get(expected.lse), rtol=0, atol=2e-6)


@pytest.mark.parametrize("function", [attention_weights, attention_scores])
def test_weights_and_scores(library: Library, call: dict[str, np.ndarray], function: Any) -> None:
    del call["value"]
    expected = library.call(function, **call, is_causal=True)
    result = library.call(function, **swapped(call), is_causal=True, layout="...LHE")
    np.testing.assert_allclose(library.get(result), library.get(expected), rtol=0, atol=2e-6)


def test_2d_has_no_heads_to_move(library: Library, call: dict[str, np.ndarray]) -> None:
    flat = {name: x[0, 0] for name, x in call.items()}
    one, other = (
        library.call(scaled_dot_product_attention, **flat, layout=layout) for layout in ("...HLE", "...LHE")
    )
    assert one.shape == other.shape == (7, 5)
    np.testing.assert_array_equal(library.get(one), library.get(other))


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_3d_and_5d(library: Library, call: dict[str, np.ndarray]) -> None:
    for change in (lambda x: x[0], lambda x: x[None]):
        reshaped = {name: change(x) for name, x in call.items()}
        expected = library.get(library.call(scaled_dot_product_attention, **reshaped))
        output = library.call(scaled_dot_product_attention, **swapped(reshaped), layout="...LHE")
        np.testing.assert_allclose(library.get(output), np.swapaxes(expected, -2, -3), rtol=0, atol=1e-6)


def test_inputs_are_not_copied(call: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values that reach the products are views of the caller's."""
    from internals import one_tile, scores, softmax

    monkeypatch.setenv("SDPA_XP_NUM_THREADS", "1")  # so that keys and values take turns
    shared: list[np.ndarray] = []
    for module in (one_tile, scores, softmax):
        product = module.matmul_grouped
        monkeypatch.setattr(
            module,
            "matmul_grouped",
            lambda xp, rows, x, *buffer, product=product: shared.append(x) or product(xp, rows, x, *buffer),
        )
    for length in (call["key"].shape[-2], 300):
        arrays = swapped({name: np.resize(x, (*x.shape[:-2], length, x.shape[-1])) for name, x in call.items()})
        shared.clear()
        scaled_dot_product_attention(**arrays, layout="...LHE")
        assert len(shared) > 1
        assert all(np.shares_memory(x, arrays["key"]) for x in shared[::2])
        assert all(np.shares_memory(x, arrays["value"]) for x in shared[1::2])
