"""`implementation="native"` on MLX arrays: its kernel computes the contract, or the call is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from calls import draw
from peers.judged import record_kernel

from sdpa_xp import scaled_dot_product_attention

mx = pytest.importorskip("mlx.core")

F = np.float32
NATIVE = {"implementation": "native"}


def numbers(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return draw(rng, *shapes)


def put(x: Any) -> Any:
    return mx.array(x) if isinstance(x, np.ndarray) else x


def attend(*arrays: np.ndarray, **rules: Any) -> np.ndarray:
    placed = {name: put(x) for name, x in rules.items()}
    return np.asarray(scaled_dot_product_attention(*map(put, arrays), **placed))


@pytest.mark.parametrize(
    "mask", [{"is_causal": True}, {"attn_mask": np.eye(2, dtype=bool)}], ids=["causal", "mask"]
)
def test_a_masked_score_is_less_than_all_others(mask: dict[str, Any]) -> None:
    """Also where those are -inf: MLX masks with the most negative finite number."""
    query, key, value = np.ones((2, 1), F), np.asarray([[-math.inf], [1.0]], F), np.asarray([[0.0], [7.0]], F)
    assert not np.any(attend(query, key, value, **mask, **NATIVE)[0] == 7)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return record_kernel("mlx", monkeypatch)


def test_many_scores_at_once_are_refused(kernel_calls: list[Any]) -> None:
    """MLX makes them all on the CPU."""
    q, k = numbers(2, (1, 1, 1100, 4), (1, 1, 1100, 4))
    attend(q, k, k)
    assert not kernel_calls
    with pytest.raises(ValueError, match="MLX's kernel makes all scores"):
        attend(q, k, k, **NATIVE)
    attend(q[..., :9, :], k, k)
    assert len(kernel_calls) == 1


def test_the_default_inside_a_transform(kernel_calls: list[Any]) -> None:
    """The portable implementation, also where a call of the same shapes had the kernel outside."""
    q, k, v = (mx.array(x) for x in numbers(4, (2, 3, 4), (2, 3, 4), (2, 3, 4)))
    expected = mx.stack([scaled_dot_product_attention(*x) for x in zip(q, k, v, strict=True)])
    assert len(kernel_calls) == 2
    output = mx.vmap(scaled_dot_product_attention)(q, k, v)
    assert len(kernel_calls) == 2
    np.testing.assert_allclose(np.asarray(output), np.asarray(expected), rtol=0, atol=1e-6)
