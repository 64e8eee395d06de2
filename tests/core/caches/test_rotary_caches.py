"""A cache that turns what goes in, against attention over queries and keys that were turned before."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from calls import draw_named, moved
from internals import judge, reference, textbook
from libraries import Library, can_write
from rotations import turned

from sdpa_xp import KVCache, PagedKVCache, masks
from sdpa_xp.positional import LinearScaling, Rotary, YaRNScaling

F = np.float32
TOKENS, SIZE = 9, 4
STARTS = [0, 4, 6]
"""Of a paged cache: an empty sequence, one that fills its block, one that does not."""
TABLE = [[7, 2, -1], [0, 9, 4], [5, 1, 8]]
ROTARIES = {
    "halves": Rotary(8),
    "interleaved": Rotary(8, base=100.0, interleaved=True),
    "a part of the width": Rotary(6, scaling=LinearScaling(2.0)),
    "YaRN": Rotary(8, scaling=YaRNScaling(4.0, 16, beta_fast=4.0)),
}
Arrays = dict[str, np.ndarray]


@pytest.fixture
def arrays(rng: np.random.Generator) -> Arrays:
    shapes = {"query": (3, 4, TOKENS, 8), "key": (3, 2, TOKENS, 8), "value": (3, 2, TOKENS, 5)}
    return draw_named(rng, shapes)


def assert_agrees(
    library: Library, result: np.ndarray, arrays: Arrays, rotary: Rotary, positions: np.ndarray, allowed: Any
) -> None:
    """The same call over queries and keys that were turned by hand."""
    tokens = np.arange(TOKENS)[None]
    exact = {"query": turned(arrays["query"], positions, rotary), "key": turned(arrays["key"], tokens, rotary)}
    exact["value"] = arrays["value"].astype(np.float64)
    call = {name: x.astype(F) for name, x in exact.items()} | {"attn_mask": allowed}
    with np.errstate(all="ignore"):
        plain = library.get(library.without_settings.call(lambda **x: textbook(library.xp, **x), **call))
        expected = reference.attention(**exact, attn_mask=allowed)[0]
    agreement = judge(result, expected, plain, "float32")
    assert agreement.agrees, agreement


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ROTARIES)
def test_cache(library: Library, arrays: Arrays, name: str, in_place: bool, layout: Any) -> None:
    """A prompt, then several tokens, then one by one: each at its place among all."""
    if in_place and not can_write(library):
        pytest.skip("in place needs arrays that can be written to")
    rotary, cache, outputs = ROTARIES[name], None, []
    for start, stop in ((0, 4), (4, 7), (7, 8), (8, 9)):
        cut = [moved(x[..., start:stop, :], layout) for x in arrays.values()]
        with library.guard():
            query, key, value = map(library.put, cut)
            if cache is None:
                room = TOKENS if in_place else None
                cache = KVCache(key, value, capacity=room, layout=layout, rotary=rotary)
            else:
                cache = cache.append(key, value, in_place=in_place)
            outputs.append(moved(library.get(cache.attend(query)), layout))
    positions = np.arange(TOKENS)
    allowed = positions <= positions[:, None]
    assert_agrees(library, np.concatenate(outputs, -2), arrays, rotary, positions[None], allowed)


@pytest.mark.parametrize("name", ROTARIES)
def test_a_cache_holds_what_apply_gives(library: Library, arrays: Arrays, name: str) -> None:
    """To the last digit, so that one may go on by hand; values stay as they are."""
    rotary, (key, value) = ROTARIES[name], (arrays["key"], arrays["value"])
    with library.guard():
        parts = [[library.put(x[:, :, cut].copy()) for x in (key, value)] for cut in (slice(5), slice(5, None))]
        cache = KVCache(*parts[0], rotary=rotary).append(*parts[1])
        by_hand = rotary.apply(library.put(key), 0)
    np.testing.assert_array_equal(library.get(cache.key), library.get(by_hand))
    np.testing.assert_array_equal(library.get(cache.value), value)


@pytest.mark.parametrize("name", ROTARIES)
def test_a_cache_that_was_put_away_goes_on(library: Library, arrays: Arrays, name: str) -> None:
    """Its keys are turned once, and the next token stands behind them."""
    rotary = ROTARIES[name]
    parts = [[x[..., cut, :].copy() for x in arrays.values()] for cut in (slice(8), slice(8, 9))]
    with library.guard():
        (_, *prompt), (query, *token) = ([library.put(x) for x in part] for part in parts)
        before = KVCache(*prompt, rotary=rotary)
        again = KVCache(before.key, before.value, rotary=rotary, rotated=True)
        output = library.get(again.append(*token).attend(query))
    positions, last = np.arange(TOKENS), arrays | {"query": parts[1][0]}
    exact = {"query": turned(last["query"], positions[None, 8:], rotary), "value": arrays["value"]}
    exact |= {"key": turned(arrays["key"], positions[None], rotary)}
    expected = reference.attention(**{n: np.asarray(x, np.float64) for n, x in exact.items()})[0]
    np.testing.assert_allclose(output, expected, rtol=0, atol=4e-6)


def pool_of(tokens: np.ndarray) -> np.ndarray:
    """A pool of NaN, with the first tokens of each sequence in its blocks."""
    pool = np.full((10, tokens.shape[1], SIZE, tokens.shape[-1]), math.nan, F)
    for sequence, length in enumerate(STARTS):
        for t in range(length):
            pool[TABLE[sequence][t // SIZE], :, t % SIZE] = tokens[sequence, :, t]
    return pool


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ROTARIES)
def test_paged_cache(library: Library, arrays: Arrays, name: str, in_place: bool, layout: Any) -> None:
    """Each sequence goes on at its own length; what stands in the pool was turned before."""
    if in_place and (library.name == "numpy-readonly" or not can_write(library)):
        pytest.skip("in place needs arrays that can be written to")
    rotary = ROTARIES[name]
    rotated = turned(arrays["key"], np.arange(TOKENS)[None], rotary).astype(F)
    pools = [moved(pool_of(x), layout) for x in (rotated, arrays["value"])]
    cache = library.call(PagedKVCache, *pools, block_table=TABLE, lengths=STARTS, layout=layout, rotary=rotary)
    outputs, queries, done = [], [], 0
    for step in (2, 1):
        where = np.asarray(STARTS)[:, None] + np.arange(done, done + step)
        cut = [np.take_along_axis(x, where[:, None, :, None], axis=-2) for x in arrays.values()]
        with library.guard():
            query, key, value = (library.put(moved(x, layout)) for x in cut)
            cache = cache.append(key, value, in_place=in_place)
            outputs.append(moved(library.get(cache.attend(query)), layout))
        queries.append(cut[0])
        done += step
    positions = np.asarray(STARTS)[:, None] + np.arange(done)
    allowed = (np.arange(TOKENS) <= positions[..., None])[:, None]
    call = arrays | {"query": np.concatenate(queries, -2)}
    assert_agrees(library, np.concatenate(outputs, -2), call, rotary, positions, allowed)


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_the_first_tokens_of_a_longer_query_stand_before_the_sequence(library: Library, arrays: Arrays) -> None:
    """At positions below 0, where a causal mask lets them attend nothing."""
    key, value, query = (arrays[name][:, :, :2].copy() for name in ("key", "value", "query"))
    with library.guard():
        cache = KVCache(
            library.put(key[:, :, :1].copy()), library.put(value[:, :, :1].copy()), rotary=Rotary(8)
        )
        output = library.get(cache.attend(library.put(query), masks.causal(), is_causal=False))
    np.testing.assert_array_equal(output[:, :, 0], np.zeros((3, 4, 5)))
    np.testing.assert_allclose(output[:, :, 1], np.repeat(value[:, :, 0], 2, axis=1), rtol=1e-6)
