"""What caches refuse to write to, or to read inside of a compiler, and that they are left as they were."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries import each_module

from sdpa_xp import PagedKVCache, varlen_attention
from sdpa_xp.errors import ArgumentTypeError

NUMBERS = {"cu_seqlens_q": [0, 2, 5], "block_table": [[0, 1], [2, 3]], "lengths": [5, 4]}


def call_with(ones: Callable[..., Any], name: str, numbers: Any) -> Any:
    """The output of a call that reads `numbers` as the argument of that name."""
    if name == "cu_seqlens_q":
        row = ones((5, 2, 8))
        return varlen_attention(row, row, row, numbers, [0, 2, 5])
    pool = ones((4, 2, 4, 8))
    rules = {"block_table": [[0, 1], [2, 3]], "lengths": [5, 4]} | {name: numbers}
    return PagedKVCache(pool, pool, **rules).attend(ones((2, 4, 1, 8)))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.needs("jax")
def test_a_constant_in_a_jit_of_jax(name: str) -> None:
    """An array that is held outside may be read or refused, but not fail by another's message."""
    import jax
    import jax.numpy as jnp

    constant = jnp.asarray(NUMBERS[name])
    with contextlib.suppress(ArgumentTypeError):
        assert jax.jit(lambda: call_with(jnp.ones, name, constant))().shape[-1] == 8


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.needs("torch")
@pytest.mark.slow
def test_traced_by_torch(name: str) -> None:
    import torch

    torch.compiler.reset()
    compiled = torch.compile(lambda x: call_with(torch.ones, name, x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=f"`{name}` must be static"):
        compiled(torch.asarray(NUMBERS[name]))


@pytest.mark.parametrize(
    "module",
    [
        *each_module("numpy", "torch", "array_api_strict"),
        pytest.param("mlx.core", marks=pytest.mark.needs("mlx")),
    ],
)
def test_one_pool_for_keys_and_values_is_not_written_in_place(module: str) -> None:
    xp = importlib.import_module(module)
    pool, token = xp.zeros((5, 2, 4, 4), dtype=xp.float32), xp.ones((1, 2, 1, 4), dtype=xp.float32)
    cache = PagedKVCache(pool, pool, [range(2)], [0])
    with pytest.raises(ValueError, match="share memory"):
        cache.append(token, token, in_place=True)
    copied = cache.append(token, 2 * token)  # a copy keeps keys and values apart
    assert (float(copied.key_blocks[0, 0, 0, 0]), float(copied.value_blocks[0, 0, 0, 0])) == (1, 2)
    assert not xp.any(pool)


@pytest.mark.parametrize("module", each_module("numpy", "torch", "array_api_strict"))
def test_overlapping_pools_are_not_written_in_place(module: str) -> None:
    """Views of the same numbers; those that interleave share none, as the two halves of one pool."""
    xp = importlib.import_module(module)
    both = xp.zeros((5, 2, 4, 4), dtype=xp.float32)
    token = xp.ones((1, 2, 1, 2), dtype=xp.float32)
    overlapping = [
        (both[:4, ..., :2], both[1:, ..., :2]),
        (both[..., :3, :2], both[..., 1:, :2]),
        (both[..., :2], both[..., 1:3]),
    ]
    for key_blocks, value_blocks in overlapping:
        cache = PagedKVCache(key_blocks, value_blocks, [range(2)], [0])
        with pytest.raises(ValueError, match="share memory"):
            cache.append(token, token, in_place=True)
    assert not xp.any(both)
    for key_blocks, value_blocks in ((both[..., :2], both[..., 2:]), (both[..., 0::2], both[..., 1::2])):
        PagedKVCache(key_blocks, value_blocks, [range(2)], [0]).append(token, 2 * token, in_place=True)
    np.testing.assert_array_equal(np.asarray(both[0, 0, 0, :]), [1, 2, 1, 2])


REPEATED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "blocks": ((3, 2, 4, 8), (0, 32, 8, 1)),
    "heads": ((3, 2, 4, 8), (32, 0, 8, 1)),
    "tokens": ((3, 2, 4, 8), (16, 8, 0, 1)),
    "widths": ((3, 2, 4, 8), (8, 4, 1, 0)),
    "blocks that overlap": ((3, 2, 4, 8), (16, 64, 8, 1)),
    "windows": ((3, 2, 4, 8), (64, 32, 1, 1)),
    "last and first widths": ((3, 2, 4, 8), (64, 32, 7, 1)),
    "nothing": ((3, 2, 4, 8), (64, 8, 16, 1)),
    "nothing, every second": ((3, 2, 4, 8), (128, 64, 16, 2)),
    "nothing, one block": ((1, 2, 4, 8), (0, 32, 8, 1)),
}
"""Shapes and strides of pools, in elements, by what stands in one place of memory."""


@pytest.mark.parametrize("module", each_module("numpy", "torch", "cupy"))
@pytest.mark.parametrize("repeated", REPEATED)
def test_a_pool_of_repeated_elements_is_not_written_in_place(module: str, repeated: str) -> None:
    """One token would stand in several places. Only NumPy makes broadcast views read-only."""
    xp = importlib.import_module(module)
    shape, strides = REPEATED[repeated]
    memory, token = xp.zeros((512,), dtype=xp.float32), xp.ones((1, 2, 1, 8), dtype=xp.float32)
    if module == "torch":
        pool = memory.as_strided(shape, strides)
    else:
        tricks = importlib.import_module(f"{module}.lib.stride_tricks")
        pool = tricks.as_strided(memory, shape, tuple(4 * step for step in strides))
    for pools in ((pool, xp.zeros(shape, dtype=xp.float32)), (xp.zeros(shape, dtype=xp.float32), pool)):
        cache = PagedKVCache(*pools, [[0]], [0])
        assert cache.append(token, token).lengths == (1,)
        if repeated.startswith("nothing"):
            cache.append(token, token, in_place=True)
            assert float(pool[0, 0, 0, 0]) == 1
            assert float(xp.sum(pool)) == 16
            continue
        with pytest.raises(TypeError, match="written to"):
            cache.append(token, token, in_place=True)
        assert not xp.any(pool)
