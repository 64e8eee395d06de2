"""What people do with a cache next: windows that roll, drafts, beams, copies; and what is refused."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from calls import draw

from sdpa_xp import KVCache, PagedKVCache, masks, scaled_dot_product_attention
from sdpa_xp.positional import Rotary, RotaryTables

F = np.float32
ROTARY = Rotary(8)
TOKENS = 12


@pytest.fixture
def arrays(rng: np.random.Generator) -> list[np.ndarray]:
    return draw(rng, (2, 4, TOKENS, 8), (2, 2, TOKENS, 8), (2, 2, TOKENS, 5))


def test_a_window_that_rolls_keeps_nothing_of_its_steps() -> None:
    """Its memory is that of its capacity after any number of steps."""
    token = np.zeros((1, 1, 2), F)
    cache = KVCache(token, token, capacity=4)

    def memory_after(steps: int) -> int:
        nonlocal cache
        for _ in range(steps):
            cache = cache.append(token, token, in_place=True).drop_first(1)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = memory_after(50)
        assert memory_after(1000) - first < 5_000
    finally:
        tracemalloc.stop()


def test_a_cache_without_tokens_goes_on_behind_them(arrays: list[np.ndarray]) -> None:
    """Whatever took the last of them away."""
    _, key, value = arrays
    token = key[:, :, :1], value[:, :, :1]
    cache = KVCache(key, value, rotary=ROTARY, first_position=[3, 5])
    scattered = cache.take_tokens([0, 4, 7])
    for empty, following in (
        (cache.drop_first(TOKENS), [[15], [17]]),
        (cache.drop_last(TOKENS), [[3], [5]]),
        (cache.take_tokens([]), [[15], [17]]),
        (scattered.drop_first(3), [[11], [13]]),
        (scattered.drop_last(3), [[3], [5]]),
        (scattered.drop_first(1).drop_last(2), [[7], [9]]),
    ):
        np.testing.assert_array_equal(empty.append(*token).positions, following)
    none = KVCache(key[:, :, :0], value[:, :, :0], positions=np.zeros((2, 0), int))
    np.testing.assert_array_equal(none.append(*token).positions, [0])


def test_rejected_drafts_in_place(arrays: list[np.ndarray]) -> None:
    """Nothing is copied; what was overwritten cannot be read any more."""
    _, key, value = arrays
    cache = KVCache(key[:, :, :4], value[:, :, :4], capacity=10, rotary=ROTARY)
    drafts = cache.append(key[:, :, 4:8], value[:, :, 4:8], in_place=True)
    accepted = drafts.drop_last(2)
    assert np.shares_memory(accepted.key, drafts.key)
    np.testing.assert_array_equal(drafts.value, value[:, :, :8])
    after = accepted.append(-key[:, :, 6:7], -value[:, :, 6:7], in_place=True)
    assert np.shares_memory(after.key, cache.key)
    np.testing.assert_array_equal(after.value[:, :, 6:], -value[:, :, 6:7])
    np.testing.assert_array_equal(accepted.value, value[:, :, :6])
    np.testing.assert_array_equal(cache.value, value[:, :, :4])
    for use in (
        lambda: drafts.key,
        lambda: drafts.attend(arrays[0][:, :, :1]),
        lambda: drafts.drop_last(1).value,
        lambda: drafts.append(key[:, :, :1], value[:, :, :1]),
    ):
        with pytest.raises(ValueError, match="must not be overwritten"):
            use()
    with pytest.raises(ValueError, match="only once"):
        accepted.append(key[:, :, :1], value[:, :, :1], in_place=True)


def test_what_the_caller_made_is_not_written_to(arrays: list[np.ndarray]) -> None:
    """Without a capacity a cache looks at the arrays of the caller; what it copied itself has room."""
    _, key, value = arrays
    kept, token = value.copy(), (-key[:, :, :1], -value[:, :, :1])
    with pytest.raises(ValueError, match="fit into"):
        KVCache(key, value).drop_last(2).append(*token, in_place=True)
    np.testing.assert_array_equal(value, kept)
    copied = KVCache(key, value).append(*token)
    after = copied.drop_last(2).append(*token, in_place=True)
    np.testing.assert_array_equal(after.value[:, :, -1:], token[1])
    np.testing.assert_array_equal(value, kept)


def test_a_window_that_moved_to_the_front(arrays: list[np.ndarray]) -> None:
    """A cache whose tokens were overwritten is refused; one whose tokens were not goes on."""
    _, key, value = arrays
    first = KVCache(key[:, :, :4], value[:, :, :4], capacity=5)
    first_slot = first.drop_last(3)
    second = first.append(key[:, :, 4:5], value[:, :, 4:5], in_place=True).drop_first(3)
    third = second.append(key[:, :, 5:6], value[:, :, 5:6], in_place=True)
    assert np.shares_memory(third.key, second._tokens.buffers.arrays["key"])
    np.testing.assert_array_equal(third.value, value[:, :, 3:6])
    np.testing.assert_array_equal(second.value, value[:, :, 3:5])
    for older in (first, first_slot):
        with pytest.raises(ValueError, match="must not be overwritten"):
            _ = older.key


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(arrays: list[np.ndarray], how: Any) -> None:
    """A copy knows its positions, and goes on by itself."""
    _, key, value = arrays
    cache = KVCache(key[:, :, :4], value[:, :, :4], capacity=9, rotary=ROTARY, first_position=[5, 0])
    cache = cache.append(key[:, :, 4:5], value[:, :, 4:5], in_place=True, positions=[[7], [9]])
    again = how(cache)
    np.testing.assert_array_equal(again.positions, cache.positions)
    again = again.append(key[:, :, 5:6], value[:, :, 5:6], in_place=True)
    if how is not copy.copy:
        cache = cache.append(-key[:, :, 5:6], -value[:, :, 5:6], in_place=True).drop_last(1)
    np.testing.assert_array_equal(again.value, value[:, :, :6])
    np.testing.assert_array_equal(again.positions, [[5, 6, 7, 8, 7, 8], [0, 1, 2, 3, 9, 10]])
    pool = np.zeros((3, 2, 4, 8), F)
    paged = PagedKVCache(pool, pool.copy(), [[0, 1]], [3], rotary=ROTARY, first_position=4)
    np.testing.assert_array_equal(how(paged).positions, [range(4, 7)])
    assert how(RotaryTables(*ROTARY.cos_sin(range(4)))).width == 8


def test_what_counts_slots_and_what_counts_positions(arrays: list[np.ndarray]) -> None:
    """A padding mask and an array have a number for each token in the cache; a window counts positions."""
    query, key, value = (x[:1] for x in arrays)
    cache = KVCache(key, value).take_tokens([0, 4, 8, 9])
    last = query[:, :, -1:]

    def over(*slots: int) -> np.ndarray:
        return scaled_dot_product_attention(last, cache.key[:, :, [*slots]], cache.value[:, :, [*slots]])

    attended = {
        masks.padding(3): (0, 1, 2),
        masks.from_array(np.asarray([False, True, True, False])): (1, 2),
        masks.document([1], [0, 1, 1, 0]): (1, 2),
        masks.sliding_window(5, 0): (1, 2, 3),
        masks.prefix(5): (0, 1),
        masks.chunked(5): (2, 3),
        masks.dilated(5): (1, 3),
        masks.from_function(lambda b, h, i, j: i - j == 1): (2,),
    }
    for mask, slots in attended.items():
        np.testing.assert_allclose(cache.attend(last, mask), over(*slots), rtol=0, atol=2e-6, err_msg=str(mask))


@pytest.mark.needs("jax")
def test_positions_under_jit() -> None:
    """As values of the trace: one start for a scan, one for each entry, one for each token."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(3)
    query, key, value = draw(rng, (2, 4, 1, 8), (2, 2, 4, 8), (2, 2, 4, 5))

    def step(query: Any, key: Any, value: Any, start: Any, drafts: Any, slots: Any) -> Any:
        cache = KVCache(key[:, :, :3], value[:, :, :3], rotary=ROTARY, first_position=start)
        cache = cache.append(key[:, :, 3:], value[:, :, 3:], positions=drafts).take_tokens(slots)
        return cache.attend(query, masks.sliding_window(6, 0)), cache.positions

    for start, drafts in ((np.int32(2), np.asarray([9])), (np.asarray([2, 0]), np.asarray([[9], [3]]))):
        arrays = [query, key, value, start, drafts.astype(np.int32), np.asarray([0, 2, 3])]
        traced, positions = jax.jit(step)(*map(jnp.asarray, arrays))
        expected, places = step(*arrays[:3], start.tolist(), *arrays[4:])
        np.testing.assert_allclose(traced, expected, rtol=0, atol=4e-6)
        np.testing.assert_array_equal(np.broadcast_to(positions, np.shape(places)), places)
