"""What caches and packed sequences refuse, by a message that names function, argument, rule and what came."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries import each_module

from sdpa_xp import PagedKVCache, varlen_attention

F, INT = np.float32, np.int64


def outcome(call: Callable[[], Any]) -> str:
    """The shape of the result, or the message where there is none."""
    try:
        return str(tuple(call().shape))
    except (TypeError, ValueError) as error:
        return str(error)


STATIC = r"must be static inside a jit.*got {0}=a traced array.*Pass a tuple of ints"


@pytest.mark.parametrize("inside", ["an argument", "made there", "a constant"])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "block_table", "lengths"])
@pytest.mark.needs("jax")
def test_traced_by_jax(name: str, inside: str) -> None:
    """An array that is held outside may be read or refused, but not fail by another's message."""
    import jax
    import jax.numpy as jnp

    numbers = {"cu_seqlens_q": [0, 2, 5], "block_table": [[0, 1], [2, 3]], "lengths": [5, 4]}[name]
    constant = jnp.asarray(numbers)

    def call(x: Any) -> Any:
        x = {"an argument": x, "made there": jnp.asarray(numbers), "a constant": constant}[inside]
        if name == "cu_seqlens_q":
            row = jnp.ones((5, 2, 8))
            return varlen_attention(row, row, row, x, [0, 2, 5])
        pool = jnp.ones((4, 2, 4, 8))
        rules = {"block_table": [[0, 1], [2, 3]], "lengths": [5, 4]} | {name: x}
        return PagedKVCache(pool, pool, **rules).attend(jnp.ones((2, 4, 1, 8)))

    if inside == "a constant":
        message = outcome(lambda: jax.jit(call)(constant))
        assert re.match(r"\(.*\b8\)$|(varlen_attention|PagedKVCache): .*must be static", message)
        return
    with pytest.raises(TypeError, match=rf"(varlen_attention|PagedKVCache): `{name}` {STATIC.format(name)}"):
        jax.jit(call)(constant)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", ["cu_seqlens_q", "block_table", "lengths"])
@pytest.mark.needs("torch")
@pytest.mark.slow
def test_traced_by_torch(name: str) -> None:
    import torch

    def call(x: Any) -> Any:
        if name == "cu_seqlens_q":
            row = torch.ones((5, 2, 8))
            return varlen_attention(row, row, row, x, [0, 2, 5])
        pool = torch.ones((4, 2, 4, 8))
        rules = {"block_table": [[0, 1], [2, 3]], "lengths": [5, 4]} | {name: x}
        return PagedKVCache(pool, pool, **rules).attend(torch.ones((2, 4, 1, 8)))

    numbers = {"cu_seqlens_q": [0, 2, 5], "block_table": [[0, 1], [2, 3]], "lengths": [5, 4]}[name]
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=f"`{name}` must be static inside a jit"):
        compiled(torch.asarray(numbers))


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
