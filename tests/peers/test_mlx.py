"""What MLX does in its own way: it is lazy, shares memory between devices, and has float64 on the CPU alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from internals import array_signatures, is_traced, judge, reference, textbook

from sdpa_xp import attention_state, masks, scaled_dot_product_attention
from sdpa_xp.positional import Rotary

mx = pytest.importorskip("mlx.core")


@pytest.fixture
def observations() -> list[bool]:
    return []


@pytest.mark.parametrize(
    ("transform", "traced"),
    [
        (lambda f: f, False),
        (lambda f: mx.grad(lambda x: f(x).sum()), False),
        (mx.checkpoint, False),
        (mx.vmap, True),
        (mx.compile, True),
        (lambda f: mx.vmap(mx.grad(lambda x: f(x).sum())), True),
    ],
    ids=["eager", "grad", "checkpoint", "vmap", "compile", "vmap of grad"],
)
def test_what_is_traced(transform: Any, traced: bool, observations: list[bool]) -> None:
    """What cannot be read; an array that was only not computed yet can."""

    def observe(x: Any) -> Any:
        later = x * 2.0
        observations.append(is_traced(later))
        if not observations[-1]:
            assert float(mx.sum(later)) == 12.0
        return later

    transform(observe)(mx.ones((2, 3)) if transform is not mx.vmap else mx.ones((1, 2, 3)))
    assert set(observations) == {traced}


def test_float64_is_not_rounded_to_float32(rng: np.random.Generator) -> None:
    """As mx.exp does; the bound is what NumPy's float64 is off by."""
    q, k, v = (rng.standard_normal((2, 4, 30, 8)) for _ in range(3))
    output, lse, _ = reference.attention(q, k, v, scale=2.0)
    state = attention_state(*(mx.array(x, dtype=mx.float64) for x in (q, k, v)), scale=2.0)
    assert judge(np.asarray(state.output), output, textbook(np, q, k, v, scale=2.0), "float64").agrees
    np.testing.assert_allclose(np.asarray(state.lse), lse, rtol=0, atol=1e-14)


def test_alike_arrays_have_one_fingerprint() -> None:
    """So that their calls are checked once."""
    prints = {array_signatures([array]) for array in (mx.zeros((2, 3)), mx.ones((2, 3)))}
    assert len(prints) == 1
    assert array_signatures([mx.zeros((2, 3), mx.float16)]) not in prints


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("width", "base", "offset"), [(8, 10000.0, 0), (6, 100.0, 11)])
def test_rope(traditional: bool, width: int, base: float, offset: Any, rng: np.random.Generator) -> None:
    """mx.fast.rope, by its names. Its angles are in float32: of 16 radians they are off by a millionth."""
    x = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    options = {"traditional": traditional, "base": base, "scale": 1.0, "offset": offset}
    expected = mx.fast.rope(mx.array(x), width, **options)
    output = Rotary(width, base, interleaved=traditional).apply(mx.array(x), offset)
    bound = 2.0**-20 * np.abs(x).max()
    np.testing.assert_allclose(np.asarray(output), np.asarray(expected), rtol=0, atol=bound)


def test_the_causal_mask_of_mlx_is_lower_right() -> None:
    """The guide to porting says so; with as many keys as queries, both corners are the same."""
    rng = np.random.default_rng(0)
    query, key, value = (mx.array(rng.standard_normal((2, 2, n, 8), np.float32)) for n in (5, 9, 9))
    theirs = mx.fast.scaled_dot_product_attention(query, key, value, scale=8**-0.5, mask="causal")
    ours = scaled_dot_product_attention(query, key, value, masks.causal("lower_right"))
    upper = scaled_dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert not np.allclose(upper, theirs, atol=1e-3)
