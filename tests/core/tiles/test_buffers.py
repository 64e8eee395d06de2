"""Buffers of tiles are lent to one call at a time, and no result lies in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from internals import ONE_CORE, memory

from sdpa_xp import attention_state, masks, scaled_dot_product_attention, varlen_attention

F = np.float32


def call(seed: int, shape: tuple[int, ...] = (2, 300, 16), dtype: Any = F) -> list[np.ndarray]:
    return [np.random.default_rng((seed, n)).standard_normal(shape).astype(dtype) for n in range(3)]


@pytest.mark.parametrize("shape", [(2, 300, 16), (1, 70, 4), (3, 1, 2, 130, 8)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, F, np.float64])
def test_no_result_is_overwritten_by_the_next_call(shape: tuple[int, ...], dtype: Any) -> None:
    first = attention_state(*call(1, shape, dtype))
    kept = first.output.copy(), first.lse.copy()
    attention_state(*call(2, shape, dtype))
    np.testing.assert_array_equal(first.output, kept[0])
    np.testing.assert_array_equal(first.lse, kept[1])


def test_a_call_inside_a_call_has_other_buffers() -> None:
    """The function of a mask is called between the scores of a tile and their product with the values."""
    outer, inner = call(1), call(2)

    def attends(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        np.testing.assert_array_equal(scaled_dot_product_attention(*inner, is_causal=True), expected)
        return j <= i + 3

    expected = scaled_dot_product_attention(*inner, is_causal=True)
    output = scaled_dot_product_attention(*outer, masks.from_function(attends))
    np.testing.assert_array_equal(output, scaled_dot_product_attention(*outer, masks.causal(3)))


def test_each_thread_has_other_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = call(1, (8, 600, 64))
    expected = scaled_dot_product_attention(*arrays)
    monkeypatch.setenv("SDPA_XP_NUM_THREADS", "4")
    for _ in range(3):  # the second call takes the buffers of the first
        np.testing.assert_array_equal(scaled_dot_product_attention(*arrays), expected)


def test_a_call_that_raised_keeps_no_buffers() -> None:
    def fails(_b: Any, _h: Any, _i: Any, _j: Any) -> Any:
        raise ValueError("of the caller")

    scaled_dot_product_attention(*call(1))
    before = sum(map(len, memory._IDLE.values()))
    assert before
    with pytest.raises(ValueError, match="of the caller"):
        scaled_dot_product_attention(*call(1), masks.from_function(fails))
    assert sum(map(len, memory._IDLE.values())) <= before


def test_calls_of_equal_shapes_share_buffers() -> None:
    for seed in range(20):
        scaled_dot_product_attention(*call(seed))
    idle = [len(buffers) for buffers in memory._IDLE.values()]
    scaled_dot_product_attention(*call(0))
    assert [len(buffers) for buffers in memory._IDLE.values()] == idle


@pytest.mark.needs("torch")
def test_torch_writes_to_no_array_of_its_inference_mode() -> None:
    import torch

    tensors = [torch.from_numpy(x) for x in call(1)]
    with torch.inference_mode():
        first = scaled_dot_product_attention(*tensors, implementation="xp")
    second = scaled_dot_product_attention(*tensors, implementation="xp")
    np.testing.assert_array_equal(first.numpy(), second.numpy())
    second += 1.0  # no error: it is an ordinary tensor


def test_a_look_at_many_values_keeps_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of one query has many keys, and sums below 1 have the values looked at."""
    monkeypatch.setattr(memory, "_IDLE", {})
    query, key = np.full((1, 8, 1, 64), -8, np.float32), np.full((1, 8, 16384, 64), 0.3, np.float32)
    scaled_dot_product_attention(query, key, key)
    sizes = [buffers.product.memory.nbytes for idle in memory._IDLE.values() for buffers in idle]
    assert 0 < max(sizes) <= 4 * ONE_CORE.scores


def test_sequences_without_keys_keep_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_IDLE", {})
    query = np.ones((50_000, 1, 64), F)
    output = varlen_attention(query, query[:0], query[:0], [0, 50_000], [0, 0])
    assert not output.any()
    sizes = [buffers.product.memory.nbytes for idle in memory._IDLE.values() for buffers in idle]
    assert max(sizes, default=0) <= 4 * ONE_CORE.scores
