"""Inside jit, vmap, gradients and torch.compile: the same numbers, and no NaN from an empty row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from calls import draw_named, gradients, tracer_of, vmap_of
from internals import reference
from libraries import Library

from sdpa_xp import attention_state, masks, scaled_dot_product_attention

F = np.float32


@pytest.fixture
def call(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Grouped heads, a mask with an empty row, and padding that holds NaN."""
    shapes = {"query": (4, 3, 8), "key": (2, 6, 8), "value": (2, 6, 5)}
    arrays = draw_named(rng, shapes)
    mask = rng.random((4, 3, 6)) < 0.7
    mask[:, 1], mask[..., 4] = False, False
    return arrays | {"attn_mask": mask}


def poisoned(call: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    bad = {name: call[name].copy() for name in ("key", "value")}
    for x in bad.values():
        x[:, 4] = math.nan
    return call | bad


@pytest.mark.leaves_out("jax-debug", "torch-cuda-rules")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.slow
def test_jit(library: Library, call: dict[str, np.ndarray]) -> None:
    trace = tracer_of(library)
    compiled = trace(lambda **arrays: attention_state(**arrays, is_causal=True, softcap=3.0))
    state = library.call(compiled, **poisoned(call))
    output, lse, _ = reference.attention(**call, is_causal=True, softcap=3.0)
    np.testing.assert_allclose(library.get(state.output), output, rtol=0, atol=2e-6)
    np.testing.assert_allclose(library.get(state.lse), lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["attn_mask", "bias", "key", "scale"])
def test_jit_of_one_argument(library: Library, call: dict[str, np.ndarray], name: str) -> None:
    """Whichever argument is traced, nothing is read of its values."""
    library.needs_jit()
    arrays = call | {"bias": np.zeros((3, 6), F), "scale": np.asarray(0.3, F)}

    def inner(traced: Any) -> Any:
        fixed = {key: library.put(x) for key, x in arrays.items() if key != name}
        return scaled_dot_product_attention(**fixed, **{name: traced})

    expected = reference.attention(**arrays)[0]
    result = library.get(library.call(library.jit(inner), arrays[name]))
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6)


@pytest.mark.leaves_out("torch-cuda-rules")
@pytest.mark.parametrize("rules", [{}, {"is_causal": True}])
def test_vmap(library: Library, call: dict[str, np.ndarray], rules: dict[str, Any]) -> None:
    q, k, v = (np.stack([call[name]] * 2) for name in ("query", "key", "value"))
    mapped = vmap_of(library)(lambda q, k, v: scaled_dot_product_attention(q, k, v, **rules))
    expected = reference.attention(q, k, v, **rules)[0]
    np.testing.assert_allclose(library.get(library.call(mapped, q, k, v)), expected, rtol=0, atol=2e-6)


@pytest.mark.leaves_out("torch-cuda-rules")
@pytest.mark.parametrize("joins", [False, True])
def test_vmap_of_masks_with_fewer_axes(library: Library, call: dict[str, np.ndarray], joins: bool) -> None:
    """MLX 0.32 maps `&` and `|` of arrays with unlike numbers of axes wrong."""
    q, k, v = (library.put(call[name]) for name in ("query", "key", "value"))
    keys = np.asarray([[1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 1]], bool)

    def attend(allowed: Any) -> Any:
        mask = masks.from_array(allowed)
        return scaled_dot_product_attention(q, k, v, masks.causal() | mask if joins else masks.causal() & mask)

    causal = np.tri(3, 6, dtype=bool)
    allowed = (causal | keys[:, None, None, :]) if joins else (causal & keys[:, None, None, :])
    both = {name: np.stack([call[name]] * 2) for name in ("query", "key", "value")}
    expected = reference.attention(**both, attn_mask=np.broadcast_to(allowed, (2, 4, 3, 6)))[0]
    mapped = library.get(library.call(vmap_of(library)(attend), keys))
    np.testing.assert_allclose(mapped, expected, rtol=0, atol=2e-6)


def test_padding_by_a_bias_in_a_traced_call(library: Library, call: dict[str, np.ndarray]) -> None:
    """-inf in a bias masks like False in a mask: NaN in the padded key and value adds nothing."""
    bias = np.where(call["attn_mask"], 0, -np.inf).astype(F)
    function = (library.jit or (lambda f: f))(scaled_dot_product_attention)
    result = library.get(library.call(function, **poisoned(call) | {"attn_mask": bias}))
    np.testing.assert_allclose(result, reference.attention(**call)[0], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_shapes_without_data(library: Library) -> None:
    """torch's meta device: shape, dtype and device of the result, and nothing is computed."""
    if not library.name.startswith("torch"):
        pytest.skip("the meta device is torch's")
    import torch

    q, k = (torch.empty(s, device="meta", dtype=torch.float16) for s in ((2, 4, 3, 8), (2, 2, 5, 8)))
    state = attention_state(q, k, k, is_causal=True)
    assert (state.output.shape, state.output.dtype) == ((2, 4, 3, 8), torch.float16)
    assert (state.lse.shape, state.lse.dtype) == ((2, 4, 3), torch.float32)
    assert state.output.device.type == "meta"


@pytest.mark.leaves_out("jax-debug", "torch-inference")
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_lse_of_an_empty_row_has_no_gradient(library: Library, rng: np.random.Generator, how: str) -> None:
    q, k = rng.standard_normal((3, 4)).astype(F), rng.standard_normal((5, 4)).astype(F)
    allowed = np.ones((3, 5), bool)
    allowed[1] = False
    rules = {"attn_mask": allowed} if how == "mask" else {"bias": np.where(allowed, 0, -np.inf).astype(F)}

    def lse_of(row: int) -> Any:
        placed = {name: library.put(x) for name, x in rules.items()}
        return lambda q: attention_state(q, library.put(k), library.put(k), **placed).lse[row]

    jacobian = np.stack([gradients(library, lse_of(row), q)[0] for row in range(3)])
    np.testing.assert_array_equal(jacobian[1], 0)
    for row in (0, 2):
        assert np.all(jacobian[row, row] != 0)
