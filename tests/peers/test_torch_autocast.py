"""torch.autocast: results have the dtype and the accuracy that they have without it; torch's own are halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sdpa_xp  # noqa: E402
from sdpa_xp import KVCache, attention_state, layers, masks, scaled_dot_product_attention  # noqa: E402


def arrays(length: int = 70, dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((1, 2, length, 16), generator=generator).to(dtype) for _ in range(3)]


LAYER = layers.MultiHeadAttention.init(torch.Generator().manual_seed(0), 16, num_heads=2)
LENGTHS: dict[str, Any] = {"cu_seqlens_q": [0, 9, 70], "cu_seqlens_k": [0, 9, 70], "layout": "...HLE"}
CALLS: dict[str, Callable[..., Any]] = {
    "default": scaled_dot_product_attention,
    "portable": lambda q, k, v: scaled_dot_product_attention(q, k, v, implementation="xp"),
    "masked": lambda q, k, v: scaled_dot_product_attention(q, k, v, masks.sliding_window(9, 2)),
    "state": lambda q, k, v: attention_state(q, k, v, is_causal=True).output,
    "lse": lambda q, k, v: attention_state(q, k, v, is_causal=True).lse,
    "weights": lambda q, k, v: sdpa_xp.attention_weights(q, k),
    "cache": lambda q, k, v: KVCache(k, v).attend(q),
    "paged": lambda q, k, v: sdpa_xp.PagedKVCache(k, v, [[0]], [q.shape[-2]]).attend(q),
    "varlen state": lambda q, k, v: sdpa_xp.varlen_attention_state(q[0], k[0], v[0], **LENGTHS).lse,
    "varlen": lambda q, k, v: sdpa_xp.varlen_attention(q[0], k[0], v[0], **LENGTHS),
    "gradient": lambda q, k, v: sdpa_xp.scaled_dot_product_attention_vjp(q, k, v)[1](v)["key"],
    "layer": lambda q, k, v: LAYER(q[0]),
}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_autocast_changes_no_bit(call: Callable[..., Any], half: Any) -> None:
    expected = call(*arrays())
    with torch.autocast("cpu", dtype=half):
        output = call(*arrays())
        assert torch.is_autocast_enabled("cpu")
    assert output.dtype == expected.dtype == torch.float32
    np.testing.assert_array_equal(output.numpy(), expected.numpy())


def test_halves_as_the_layers_of_torch_give_them_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.nn.Linear(16, 16)(torch.ones(1, 2, 5, 16))
        assert scaled_dot_product_attention(x, x, x).dtype == x.dtype == torch.bfloat16
        assert torch.nn.functional.scaled_dot_product_attention(*arrays()).dtype == torch.bfloat16


def test_gradients_of_autograd_under_autocast() -> None:
    def gradients(enabled: bool) -> Any:
        leaves = [x.requires_grad_() for x in arrays()]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = scaled_dot_product_attention(*leaves, implementation="xp")
        return torch.autograd.grad(output.square().sum(), leaves)

    for gradient, expected in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_array_equal(gradient.numpy(), expected.numpy())


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
def test_inside_torch_compile() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def attend(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    expected = scaled_dot_product_attention(*arrays(), is_causal=True, implementation="xp")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend(*arrays())
    np.testing.assert_allclose(output.numpy(), expected.numpy(), rtol=0, atol=2e-6)
