"""Quantised caches: numbers are wrong by half a step at most, and all else is as in a cache of those."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import numpy as np
import pytest
from calls import assert_agrees, draw, draw_named, moved
from internals import override, reference
from libraries import Library, each_module

from sdpa_xp import KVCache, PagedKVCache, biases, masks
from sdpa_xp.positional import Rotary

F = np.float32
LARGEST = {"int8": 127, "int4": 7}
KINDS = [(dtype, per) for dtype in LARGEST for per in ("token", "channel")]
SHAPES = {"query": (2, 4, 12, 8), "key": (2, 2, 12, 8), "value": (2, 2, 12, 6)}
SINKS = np.asarray([0.5, -3.0, 4.0, 1.0], F)


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    drawn = draw_named(rng, SHAPES)
    drawn["key"][..., 3] *= 30  # a channel as those that per="channel" is for
    return drawn


def steps(tokens: np.ndarray, prompt: np.ndarray, dtype: str, per: str) -> np.ndarray:
    """The difference of neighbouring numbers that tokens (..., H, n, E) are stored as."""
    tokens, prompt = tokens.astype(float), prompt.astype(float)
    channels = np.ones_like(prompt[..., :1, :])
    if per == "channel":
        largest = np.abs(prompt).max(-2, keepdims=True)
        channels = np.maximum(largest / largest.mean(-1, keepdims=True), 1.0)
    return np.abs(tokens / channels).max(-1, keepdims=True) / LARGEST[dtype] * channels


def assert_stored(wide: np.ndarray, exact: np.ndarray, step: np.ndarray) -> None:
    assert (np.abs(wide.astype(float) - exact) <= step * 0.5 * (1 + 1e-4) + 4e-7 * np.abs(exact)).all()


def parts(arrays: dict[str, np.ndarray], start: int, stop: int, layout: str = "...HLE") -> list[np.ndarray]:
    return [moved(arrays[name][..., start:stop, :], layout) for name in ("key", "value")]


def copied(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize(("dtype", "per"), KINDS)
def test_appends_drops_and_takes(
    library: Library, arrays: dict[str, np.ndarray], dtype: Any, per: Any, layout: Any
) -> None:
    """After each step the tokens are right to half a step, and attention is that of these tokens."""
    rules: dict[str, Any] = {"softcap": 2.0, "attn_mask": masks.sliding_window(5, 0), "bias": biases.alibi(4)}

    def check(cache: KVCache[Any], tokens: list[int], queries: int) -> None:
        """`queries` are the last tokens of the cache, whose numbers in the whole text are `tokens`."""
        with library.guard():
            query = library.put(moved(arrays["query"][..., tokens[-queries:], :], layout))
            state = cache.attend_state(query, sinks=library.put(SINKS), **rules)
            key, value = (moved(library.get(x), layout) for x in (cache.key, cache.value))
            output, lse = moved(library.get(state.output), layout), library.get(state.lse)
        exact = {name: arrays[name][..., tokens, :] for name in ("key", "value")}
        assert_stored(key, exact["key"], steps(exact["key"], arrays["key"][..., :5, :], dtype, per))
        assert_stored(value, exact["value"], steps(exact["value"], exact["value"], dtype, "token"))
        i, j = np.asarray(tokens)[-queries:, None], np.asarray(tokens)
        bias = -(0.25 ** np.arange(1, 5, dtype=F))[:, None, None] * (i - j).astype(F)
        call = {"query": arrays["query"][..., tokens[-queries:], :], "key": key, "value": value}
        call |= {"attn_mask": (j <= i) & (i - j <= 5), "bias": bias}
        assert_agrees(library, output, call, softcap=2.0, sinks=SINKS)
        expected = reference.attention(**call, softcap=2.0, sinks=SINKS)[1]
        np.testing.assert_allclose(lse, expected, rtol=2e-6, atol=4e-6)

    with library.guard():

        def put(start: int, stop: int) -> list[Any]:
            return [library.put(x) for x in parts(arrays, start, stop, layout)]

        cache = KVCache(*put(0, 5), layout=layout).quantised(dtype, per=per)
        one, two = cache.append(*put(5, 6)), cache.append(*put(5, 6)).append(*put(6, 10))
        cut = two.drop_last(1).drop_first(2)
        picked = cut.take_tokens([0, 2, 3, 6]).append(*put(9, 12), positions=9)
        flipped = one.take_entries([1, 0])
        np.testing.assert_array_equal(library.get(flipped.key), library.get(one.key)[::-1])
    check(cache, [*range(5)], 3)
    check(one, [*range(6)], 1)
    check(two, [*range(10)], 4)
    check(cut, [*range(2, 9)], 2)
    check(picked, [2, 4, 5, 8, 9, 10, 11], 3)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize(("dtype", "per"), KINDS)
def test_blocks_of_a_pool(library: Library, arrays: dict[str, np.ndarray], dtype: Any, per: Any) -> None:
    """Sequences in blocks have the tokens, the appended ones too, and the attention of caches of their own."""
    table, lengths, size = [[4, 1, 0], [2, 5, 3]], [9, 6], 4
    pools = {name: np.zeros((6, 2, size, arrays[name].shape[-1]), F) for name in ("key", "value")}
    for name, pool in pools.items():
        for sequence, row in enumerate(table):
            for place, block in enumerate(row):
                pool[block] = arrays[name][sequence, :, place * size : (place + 1) * size]
    new = [arrays[name][:, :, 10:12] for name in ("key", "value")]
    with library.guard():
        placed = [library.put(x) for x in pools.values()]
        before = PagedKVCache(*placed, table, lengths).quantised(dtype, per=per)
        cache = before.append(*(library.put(x) for x in new))
        packed = [library.put(np.concatenate([*x], axis=1)) for x in new]
        grown = before.append(*packed, cu_seqlens_k=[0, 2, 4])
        np.testing.assert_array_equal(library.get(grown.key_blocks), library.get(cache.key_blocks))
        again = cache.with_table([[4, 1, 0], [2, 5, 3]], [11, 8])
        query, sinks = library.put(arrays["query"][:, :, :2]), library.put(SINKS)
        state = again.attend_state(query, masks.sliding_window(6, 0), softcap=1.5, sinks=sinks)
        output, *blocks = map(library.get, (state.output, cache.key_blocks, cache.value_blocks))
    for n, (row, length) in enumerate(zip(table, (11, 8), strict=True)):
        key, value = (np.concatenate(pool[row], axis=1)[:, :length] for pool in blocks)
        for wide, name in ((key, "key"), (value, "value")):
            kept = arrays[name][n, :, : length - 2]
            exact = np.concatenate([kept, arrays[name][n, :, 10:12]], axis=1)
            prompt = np.concatenate([*pools[name][[4, 1, 0, 2, 5]]], axis=1)
            assert_stored(wide, exact, steps(exact, prompt, dtype, per if name == "key" else "token"))
        i, j = np.arange(length - 2, length)[:, None], np.arange(length)
        call = {"query": arrays["query"][n, :, :2], "key": key, "value": value}
        call["attn_mask"] = (j <= i) & (i - j <= 6)
        assert_agrees(library, output[n], call, softcap=1.5, sinks=SINKS)


@pytest.mark.needs("jax")
@pytest.mark.parametrize(("dtype", "per"), [("int8", "channel"), ("int4", "token")])
def test_a_cache_goes_through_jit(arrays: dict[str, np.ndarray], dtype: Any, per: Any) -> None:
    """A step that is compiled takes a cache and returns one, as a tree whose structure does not change."""
    import jax

    def step(cache: KVCache[Any], key: Any, value: Any, query: Any) -> Any:
        cache = cache.append(key, value)
        return cache, cache.attend(query, masks.sliding_window(4, None))

    prompt, token = parts(arrays, 0, 6), (*parts(arrays, 6, 7), arrays["query"][:, :, 6:7])
    expected, output = step(KVCache(*prompt).quantised(dtype, per=per), *token)
    prefilled = jax.jit(lambda *prompt: KVCache(*prompt).quantised(dtype, per=per))(*prompt)
    grown, traced = jax.jit(step)(prefilled, *token)
    assert jax.tree.structure(grown) == jax.tree.structure(prefilled)
    np.testing.assert_allclose(traced, output, atol=2e-6)
    np.testing.assert_allclose(grown.key, expected.key, atol=2e-6)
    assert repr(jax.tree.map(lambda leaf: None, grown)).startswith("KVCache(key=None")


def bound(
    query: np.ndarray, key_step: np.ndarray, value: np.ndarray, kind: str, allowed: np.ndarray, *, sinks: bool
) -> np.ndarray:
    """The documented bound of the error of the output (heads, L, Ev), with `query` times the scale."""
    heads, value = len(value), value.astype(float)
    of_heads = np.abs(query.astype(float)).reshape(heads, -1, *query.shape[-2:])
    epsilon = np.where(allowed, np.einsum("hglc,hsc->hgls", of_heads, key_step) / 2, 0.0).max(-1, keepdims=True)
    value_step = np.abs(value).max(-1)[:, None, None] / LARGEST[kind]
    zero = [0.0] if sinks else []
    values, attended = value[:, None, None], allowed[..., None]
    most = np.where(attended, values, -np.inf).max(-2, initial=max([*zero, -np.inf]))
    least = np.where(attended, values, np.inf).min(-2, initial=min([*zero, np.inf]))
    half = np.where(allowed, value_step, 0.0).max(-1, keepdims=True) / 2
    return (half + np.tanh(epsilon / 2) * (most - least)).reshape(*query.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize(("kind", "per"), KINDS)
def test_the_documented_bound(rng: np.random.Generator, dtype: Any, kind: Any, per: Any) -> None:
    """The output is as near to that of the exact cache as the docstring says, whatever the tokens."""
    nearest = 0.0
    for _ in range(25):
        heads, group, tokens, width = rng.integers(1, 4, 4) * [1, 1, 9, 2]
        queries = int(rng.integers(1, tokens + 1))
        spread = np.exp(rng.normal(size=(heads, 1, width)) * rng.choice([0.1, 1.0, 2.0]))
        key, value = (rng.normal(size=(heads, tokens, width)) * spread for _ in range(2))
        query = (rng.normal(size=(heads * group, queries, width)) * rng.choice([0.1, 1.0, 3.0])).astype(dtype)
        key, value = key.astype(dtype), (value * 10.0 ** rng.integers(-3, 3)).astype(dtype)
        cut, scale = int(rng.integers(1, tokens + 1)), float(rng.choice([-1.0, 0.3, 2.0]))
        exact = KVCache(key, value)
        cache = KVCache(key[:, :cut], value[:, :cut]).quantised(kind, per=per)
        cache = cache.append(key[:, cut:], value[:, cut:])
        rules: dict[str, Any] = {"scale": scale, "attn_mask": masks.sliding_window(7, 0)}
        rules["softcap"] = float(rng.choice([0.0, 3.0]))
        if rng.random() < 0.5:
            rules["sinks"] = rng.normal(size=heads * group).astype(dtype)
        error = np.abs(cache.attend(query, **rules).astype(float) - exact.attend(query, **rules))
        i, j = np.arange(tokens - queries, tokens)[:, None], np.arange(tokens)
        step, allowed = steps(key, key[:, :cut], kind, per), (j <= i) & (i - j <= 7)
        most = bound(scale * query, step, value, kind, allowed, sinks="sinks" in rules)
        rounding = 8 * np.finfo(dtype).eps * np.abs(value.astype(float)).max() + 1e-5 * most
        assert (error <= most + rounding).all()
        nearest = max(nearest, float((error / np.maximum(most, 1e-30)).max()))
    assert nearest > 0.1  # the bound is not so wide that it says nothing


def test_a_token_unlike_the_prompt_is_stored_as_well_as_any(rng: np.random.Generator) -> None:
    """Also in channels that were 0 there."""
    key, value = draw(rng, (2, 200, 64), (2, 200, 64))
    late = np.zeros((2, 1, 64), F)
    late[..., 5] = 1e3
    cache = KVCache(np.where(np.arange(64) < 32, key, 0), value).quantised("int8", per="channel")
    np.testing.assert_allclose(cache.append(late, late).key[:, -1:], late, rtol=1e-5)


def test_bytes_of_a_cache(rng: np.random.Generator) -> None:
    for width, least in ((64, {"int8": 3.76, "int4": 7.1}), (128, {"int8": 3.87, "int4": 7.5})):
        exact = KVCache(*draw(rng, (2, 50, width), (2, 50, width)), capacity=60)
        for dtype, factor in least.items():
            cache = exact.quantised(dtype)  # type: ignore[arg-type]
            assert exact.nbytes == 2 * 2 * 50 * width * 4 > factor * cache.nbytes
            longer = cache.append(*draw(rng, (2, 10, width), (2, 10, width)), in_place=True)
            reserved = longer.nbytes  # now all of the memory that both have
            assert reserved == cache.nbytes * 6 // 5
            assert reserved < len(pickle.dumps(cache)) < reserved + 2000


def test_a_window_that_rolls_in_place(arrays: dict[str, np.ndarray]) -> None:
    rolling = KVCache(*parts(arrays, 0, 3), capacity=6, rotary=Rotary(8)).quantised("int8")
    whole = KVCache(*parts(arrays, 0, 3), rotary=Rotary(8)).quantised("int8")
    for n in range(3, 12):
        rolling = rolling.append(*parts(arrays, n, n + 1), in_place=True).drop_first(1)
        whole = whole.append(*parts(arrays, n, n + 1))
        query = arrays["query"][:, :, n : n + 1]
        np.testing.assert_allclose(
            rolling.attend(query), whole.attend(query, masks.sliding_window(2, 0)), atol=2e-6
        )
    for again in (copy.deepcopy(rolling), copied(rolling)):
        np.testing.assert_array_equal(again.attend(query), rolling.attend(query))
        assert repr(again) == repr(rolling)


@pytest.mark.leaves_out("jax-debug")
@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("per", "first"), [("token", 0), ("channel", 0), ("channel", 8)])
def test_a_token_that_is_not_finite(
    library: Library, arrays: dict[str, np.ndarray], bad: float, per: Any, first: int
) -> None:
    """All of its numbers are NaN, which the rows that attend to it show, and no others.

    From query 8 on there are few queries, the first of which attends to token 5.
    """
    token = 5 if first else 4
    rows = slice(max(token, first) - first, token + 4 - first)
    for name in ("key", "value"):
        changed = {**arrays, name: arrays[name].copy()}
        changed[name][0, 1, token, 2] = bad
        with library.guard():
            cache = KVCache(*(library.put(x) for x in parts(changed, 0, 12))).quantised("int8", per=per)
            query = library.put(changed["query"][:, :, first:])
            output = library.get(cache.attend(query, masks.sliding_window(3, 0)))
            wide = library.get(getattr(cache, name))
        is_nan = np.isnan(output)
        assert is_nan[0, 2:, rows].all()
        assert is_nan.sum() == 2 * (rows.stop - rows.start) * 6
        assert np.isnan(wide).sum() == wide.shape[-1]


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_step_multiplies_no_token_by_its_scale(
    arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    """The scores and weights of few queries have fewer elements than the tokens."""
    cache = KVCache(*parts(arrays, 0, 12)).quantised(dtype, per="channel")
    pools = (arrays[name].reshape(4, 2, 6, -1) for name in ("key", "value"))
    paged = PagedKVCache(*pools, [[0, 1], [2, 3]], [12, 12]).quantised(dtype)
    query = arrays["query"][:, :, -1:]
    expected = [kind.attend(query) for kind in (cache, paged)]

    def widen(*_arguments: Any, **_keywords: Any) -> None:
        raise AssertionError

    override(monkeypatch, "widen", widen)
    for kind, output in zip((cache, paged), expected, strict=True):
        np.testing.assert_array_equal(kind.attend(query), output)
    with pytest.raises(AssertionError):
        cache.attend(arrays["query"])


def test_long_prompts_are_quantised_part_by_part(
    arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts: tuple[Any, ...] = ("...HLE", "...LHE")
    caches = [KVCache(*parts(arrays, 0, 11, layout), layout=layout) for layout in layouts]
    pool = arrays["key"].reshape(12, 2, 2, 8)
    caches.append(PagedKVCache(pool, pool, [[3, 5]], [3]))  # type: ignore[arg-type]
    stored = [cache.quantised("int4") for cache in caches]
    override(monkeypatch, "MOST_AT_ONCE", 70)  # two tokens of all heads, or two blocks
    for cache, expected in zip(caches, stored, strict=True):
        for name in ("key_blocks",) if isinstance(cache, PagedKVCache) else ("key", "value"):
            again = cache.quantised("int4")
            np.testing.assert_array_equal(getattr(again, name), getattr(expected, name))


def test_the_largest_and_the_smallest_numbers() -> None:
    for dtype in (np.float32, np.float64):
        largest = np.finfo(dtype).max * (1 - np.arange(40, dtype=dtype) * np.finfo(dtype).eps)
        # Each is an entry of a batch, beside smaller numbers, so that its channel is divided by its magnitude.
        tokens = np.stack([largest, *(largest * dtype(part) for part in (0.3, 0.1, 0.7))], axis=-1)
        cache = KVCache(*[tokens[:, None, None]] * 2)
        assert all(np.isfinite(cache.quantised(kind, per=per).key).all() for kind, per in KINDS)
    for dtype in (np.float16, np.float32, np.float64):
        largest = np.finfo(dtype).max
        tokens = np.asarray([[[largest, -largest], [0.0, 0.0], [np.finfo(dtype).tiny * 2**9, 0.0]]], dtype)
        for kind, per in KINDS:
            cache = KVCache(tokens, tokens).quantised(kind, per=per)
            np.testing.assert_allclose(cache.key, tokens, rtol=1e-3)
            np.testing.assert_allclose(cache.value, tokens, rtol=1e-3)
            assert cache.key.dtype == dtype


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize(("dtype", "per"), KINDS)
def test_a_cache_of_stored_arrays(
    library: Library, arrays: dict[str, np.ndarray], dtype: Any, per: Any
) -> None:
    """It is the cache that stored them, for halves if it is told so."""
    with library.guard():
        prompt, new = ([library.put(x) for x in parts(arrays, *ends)] for ends in ((0, 5), (5, 7)))
        cache = KVCache(*prompt, rotary=Rotary(8), first_position=3).quantised(dtype, per=per)
        again = KVCache.from_stored(cache.stored, rotary=Rotary(8), first_position=3)
        query = library.put(arrays["query"][:, :, :2])
        outputs = [library.get(kind.append(*new).attend(query)) for kind in (cache, again)]
        assert repr(again) == repr(cache)
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("name", each_module("numpy", "torch"))
def test_stored_arrays_of_halves(arrays: dict[str, np.ndarray], name: str) -> None:
    """The dtype may be NumPy's for another library, too."""
    xp = importlib.import_module(name)
    halves = [xp.asarray(x.astype(np.float16)) for x in parts(arrays, 0, 5)]
    cache = KVCache(*halves).quantised("int8")
    again = KVCache.from_stored(cache.stored, dtype=np.float16)
    assert again.key.dtype == again.append(*halves).attend(halves[0]).dtype == xp.float16
    assert {*KVCache(*halves).stored} == {"key", "value"}
    assert KVCache.from_stored(cache.stored).key.dtype == xp.float32


@pytest.mark.parametrize("queries", [1, 12])
def test_stored_arrays_in_any_order_in_memory(arrays: dict[str, np.ndarray], queries: int) -> None:
    cache = KVCache(*parts(arrays, 0, 12)).quantised("int4", per="channel")
    again = KVCache.from_stored({name: np.asfortranarray(x) for name, x in cache.stored.items()})
    np.testing.assert_array_equal(again.key, cache.key)
    query = arrays["query"][:, :, -queries:]
    np.testing.assert_allclose(again.attend(query), cache.attend(query), rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize(("dtype", "per"), KINDS)
def test_the_heads_of_a_call_that_is_shared_out(
    library: Library, rng: np.random.Generator, dtype: Any, per: Any
) -> None:
    """Threads take some heads each, with the steps and the channels of these."""
    drawn = draw_named(rng, {"query": (2, 8, 40, 16), "key": (2, 4, 600, 16), "value": (2, 4, 600, 16)})
    drawn["key"] *= rng.uniform(1, 4, (2, 4, 1, 16)).astype(F)
    query, key, value = map(library.put, drawn.values())
    cache = KVCache(key, value).quantised(dtype, per=per)
    stored = {name: library.get(getattr(cache, name)) for name in ("key", "value")}
    allowed = np.arange(600) <= 560 + np.arange(40)[:, None]
    call = {"query": drawn["query"], **stored, "attn_mask": allowed}
    assert_agrees(library, library.get(cache.attend(query)), call)


def test_empty_caches(arrays: dict[str, np.ndarray]) -> None:
    """A cache may begin without tokens, and values may have no width."""
    cache = KVCache(arrays["key"][:, :, :0], arrays["value"][:, :, :0, :0]).quantised("int4")
    assert cache.nbytes == 0
    assert cache.attend(arrays["query"][:, :, :0]).shape == (2, 4, 0, 0)
    cache = cache.append(arrays["key"][:, :, :2], arrays["value"][:, :, :2, :0])
    assert cache.attend(arrays["query"][:, :, :1]).shape == (2, 4, 1, 0)


@pytest.mark.needs("torch")
def test_gradients_of_queries_are_those_of_the_stored_tokens(arrays: dict[str, np.ndarray]) -> None:
    import torch

    query, key, value = (torch.from_numpy(x).double() for x in arrays.values())
    cache, query = KVCache(key, value).quantised("int8", per="channel"), query.requires_grad_()
    stored, plain = (
        torch.autograd.grad(kind.attend(query, masks.sliding_window(3, 0)).square().sum(), query)[0]
        for kind in (cache, KVCache(cache.key, cache.value))
    )
    torch.testing.assert_close(stored, plain)


def test_copies_of_pages() -> None:
    pool = np.zeros((3, 1, 4, 8), F)
    paged = PagedKVCache(pool, pool, [[0]], [0]).quantised("int8")
    assert {repr(way(paged)) for way in (copy.copy, copy.deepcopy, copied)} == {repr(paged)}


@pytest.mark.parametrize("rotary", [None, Rotary(8)])
@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("dtype", "per"), KINDS)
def test_tiny_tokens_where_numpy_raises(dtype: Any, per: Any, name: str, rotary: Any) -> None:
    """A scale, a channel or a code that underflows is no error; neither is a tiny number beside a large one."""
    tokens = np.random.default_rng(0).standard_normal((2, 2, 6, 8))
    tokens[:, :, 3:5, ::2] = np.reshape([1e-45, 1e-320, 1e-7, 1e-38], (2, 2, 1, 1))
    tokens[:, :, 3, 1::2], tokens[:, :, 4, 1::2] = 1e-40, 1e3
    tokens = tokens.astype(name)

    def numbers(first: int, in_place: bool) -> list[np.ndarray]:
        cache = KVCache(tokens[:, :, :first], tokens[:, :, :first], capacity=8, rotary=rotary)
        cache = cache.quantised(dtype, per=per)
        cache = cache.append(tokens[:, :, first:], tokens[:, :, first:], in_place=in_place)
        pool = np.zeros((4, 2, 4, 8), name)
        pool[::2, :, :3] = tokens[:, :, 1:4]
        paged = PagedKVCache(pool, pool.copy(), [[0, 1], [2, 3]], [3, 3], rotary=rotary)
        paged = paged.quantised(dtype, per=per).append(tokens[:, :, 3:], tokens[:, :, 3:], in_place=in_place)
        arrays = [*cache.stored.values(), cache.key, paged.key_blocks, paged.value_blocks]
        query = tokens[:, :, -2:]
        return [*arrays, cache.attend(query), *cache.attend_state(query), *paged.attend_state(query)]

    for first, in_place in ((6, False), (1, False), (1, True)):
        with np.errstate(all="raise"):
            computed = numbers(first, in_place)
        for part, expected in zip(computed, numbers(first, in_place), strict=True):
            np.testing.assert_array_equal(part, expected)
            assert np.isfinite(part).all()
