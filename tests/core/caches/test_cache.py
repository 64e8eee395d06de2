"""Decoding from a cache, step by step, gives what one pass over all tokens gives: output and log-sum-exp."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agreement import CASES, HEADS, Case, keywords, meaning
from calls import assert_agrees, draw, draw_named, moved
from internals import reference
from libraries import LIBRARIES, Library, can_write

from sdpa_xp import KVCache, attention_state, merge_states, scaled_dot_product_attention
from sdpa_xp.positional import Rotary

F = np.float32
TOKENS = 7
MIXED = [3, 2, 1, 1]
Arrays = dict[str, np.ndarray]


@pytest.fixture
def arrays(rng: np.random.Generator) -> Arrays:
    shapes = {"query": (2, HEADS, TOKENS, 8), "key": (2, 2, TOKENS, 8), "value": (2, 2, TOKENS, 5)}
    return draw_named(rng, shapes)


def decode(library: Library, arrays: Arrays, steps: list[int], **rules: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of steps that append the tokens of their length and attend with their queries."""
    outputs, lses, cache = [], [], None
    with library.guard():
        placed = {name: library.put(x) if isinstance(x, np.ndarray) else x for name, x in rules.items()}
    for stop, step in zip(itertools.accumulate(steps), steps, strict=True):
        cut = [np.ascontiguousarray(x[..., stop - step : stop, :]) for x in arrays.values()]
        with library.guard():
            query, key, value = (library.put(x) for x in cut)
            cache = KVCache(key, value) if cache is None else cache.append(key, value)
            output, state = cache.attend(query, **placed), cache.attend_state(query, **placed)
        assert len(cache) == stop
        assert output.dtype == query.dtype
        near = {"rtol": 0, "atol": 2e-6 if arrays["key"].dtype == F else 2**-6}
        np.testing.assert_allclose(*(library.get(x).astype(F) for x in (state.output, output)), **near)
        outputs.append(library.get(output))
        lses.append(library.get(state.lse))
    return np.concatenate(outputs, axis=-2), np.concatenate(lses, axis=-1)


def expected(arrays: Arrays, steps: list[int], case: Case) -> dict[str, Any]:
    """The call of one full pass: as arrays, without the library. A query sees what was cached at its step."""
    b, h, i, j = np.ogrid[: len(arrays["key"]), :HEADS, :TOKENS, :TOKENS]
    cached = np.repeat(list(itertools.accumulate(steps)), steps)[:, None]
    told = meaning(case, b, h, i, j, i)
    told["bias"] = told["bias"].astype(arrays["query"].dtype)
    return arrays | told | {"attn_mask": told["attn_mask"] & (j < cached)}


def assert_decodes(library: Library, arrays: Arrays, steps: list[int], case: Case) -> None:
    """Output and log-sum-exp of a loop of steps are those of one full pass."""
    output, lse = decode(library, arrays, steps, **keywords(library, case, is_causal=True))
    call = expected(arrays, steps, case)
    assert_agrees(library, output, {name: call.pop(name) for name in (*arrays, "attn_mask", "bias")}, **call)
    np.testing.assert_allclose(
        lse, reference.attention(**expected(arrays, steps, case))[1], rtol=2e-6, atol=4e-6
    )


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", [name for name in CASES if name != "padding"])  # a step has too few tokens
def test_decoding_is_one_full_pass(library: Library, rng: np.random.Generator, name: str) -> None:
    """Positions count from the first token of the cache, for masks and biases, in every step."""
    shapes = {"query": (4, HEADS, TOKENS, 8), "key": (4, 2, TOKENS, 8), "value": (4, 2, TOKENS, 5)}
    assert_decodes(library, draw_named(rng, shapes), MIXED, CASES[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(library: Library, arrays: Arrays, dtype: str) -> None:
    library.needs(dtype)
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    assert_decodes(library, arrays, [6, 1], CASES["window"])


@pytest.mark.leaves_out("jax-debug")
@pytest.mark.parametrize("tokens", [0, 3])
def test_more_queries_than_tokens(library: Library, arrays: Arrays, tokens: int) -> None:
    """Refused, since an `append` is missing, if not told `is_causal=False`: each attends the whole cache."""
    if library.lazy and not tokens:
        pytest.skip("Dask has no arrays of size 0")
    with library.guard():
        query, key, value = (library.put(x) for x in arrays.values())
        cache = KVCache(key[:, :, :tokens, :], value[:, :, :tokens, :])
        other = cache.attend(query[:, :, : tokens + 1, :], is_causal=False)
        plain = scaled_dot_product_attention(
            query[:, :, : tokens + 1, :], cache.key, cache.value, implementation="xp"
        )
    np.testing.assert_array_equal(library.get(other), library.get(plain))


@pytest.mark.sampled(0, on="EAGER_JAX")
def test_base_2_and_a_rotary(library: Library, arrays: Arrays) -> None:
    rotary, (query, key, value) = Rotary(6), arrays.values()
    with library.guard():
        cache = KVCache(library.put(key), library.put(value), rotary=rotary)
        state = cache.attend_state(library.put(query[:, :, -3:].copy()), lse_base=2)
    rotated = [rotary.apply(x.astype(np.float64), 0) for x in (query, key)]
    expected = reference.attention(*rotated, value, is_causal=True)[1][:, :, -3:]
    np.testing.assert_allclose(library.get(state.lse) * math.log(2), expected, rtol=0, atol=4e-6)


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_a_cache_merges_with_keys_elsewhere(library: Library, arrays: Arrays, layout: Any) -> None:
    """The keys of a shared prompt are in one array, those of each text in its cache."""
    prompt = draw(np.random.default_rng(1), (1, 2, 5, 8), (1, 2, 5, 5))
    with library.guard():
        query, *tokens = (library.put(moved(x, layout)) for x in arrays.values())
        shared = [library.put(moved(x, layout)) for x in prompt]
        states = [
            attention_state(query, *shared, layout=layout),
            KVCache(*tokens, layout=layout).attend_state(query),
        ]
        merged = merge_states(states, layout=layout)
    pairs = zip(prompt, (arrays["key"], arrays["value"]), strict=True)
    joined = [np.concatenate([np.repeat(x, 2, axis=0), y], axis=-2) for x, y in pairs]
    expected = reference.attention(arrays["query"], *joined, np.tri(TOKENS, TOKENS + 5, 5, dtype=bool))
    np.testing.assert_allclose(moved(library.get(merged.output), layout), expected[0], rtol=0, atol=4e-6)
    np.testing.assert_allclose(library.get(merged.lse), expected[1], rtol=0, atol=4e-6)


def parts(library: Library, arrays: Arrays, *cuts: int) -> list[tuple[Any, Any]]:
    """Keys and values of the tokens between each two of `cuts`."""
    with library.guard():
        return [
            (library.put(arrays["key"][:, :, a:b].copy()), library.put(arrays["value"][:, :, a:b].copy()))
            for a, b in itertools.pairwise(cuts)
        ]


def assert_holds(library: Library, cache: KVCache[Any], arrays: Arrays, tokens: int) -> None:
    assert len(cache) == tokens
    assert cache.key.shape == (2, 2, tokens, 8)
    np.testing.assert_array_equal(library.get(cache.key), arrays["key"][:, :, :tokens])
    np.testing.assert_array_equal(library.get(cache.value), arrays["value"][:, :, :tokens])


def test_append_leaves_the_old_cache(library: Library, arrays: Arrays) -> None:
    """Two continuations of one prompt, as in a beam search."""
    first, second, third = parts(library, arrays, 0, 3, 5, 6)
    with library.guard():
        cache = KVCache(*first)
        longer = cache.append(*second)
        other = cache.append(*third)
    assert_holds(library, cache, arrays, 3)
    assert_holds(library, longer, arrays, 5)
    assert len(other) == 4
    np.testing.assert_array_equal(library.get(other.key)[:, :, 3], arrays["key"][:, :, 5])


def test_append_in_place_leaves_the_old_cache(library: Library, arrays: Arrays) -> None:
    """Its tokens stay as they are, though the newer caches share its arrays."""
    first, second, third = parts(library, arrays, 0, 3, 5, 6)
    if not can_write(library):
        with library.guard(), pytest.raises(TypeError, match="written to"):
            KVCache(*first, capacity=8)
        with library.guard():
            cache = KVCache(*first)
        with library.guard(), pytest.raises(TypeError, match="written to"):
            cache.append(*second, in_place=True)
        return
    query = arrays["query"][:, :, 2:3]
    with library.guard():
        cache = KVCache(*first, capacity=8)
        before = library.get(cache.attend(library.put(query)))
        longer = cache.append(*second, in_place=True)
        longest = longer.append(*third, in_place=True)
    for some_cache, tokens in ((cache, 3), (longer, 5), (longest, 6)):
        assert_holds(library, some_cache, arrays, tokens)
    with library.guard():
        after = library.get(cache.attend(library.put(query)))
    np.testing.assert_array_equal(before, after)


def test_in_place_twice_or_beyond_the_capacity_is_refused(library: Library, arrays: Arrays) -> None:
    """A functional append is free to branch off; nothing is written by what is refused."""
    if not can_write(library):
        pytest.skip("in place needs arrays that can be written to")
    first, second, third, rest = parts(library, arrays, 0, 3, 5, 6, 7)
    with library.guard():
        cache = KVCache(*first, capacity=6)
        longer = cache.append(*second, in_place=True)
        with pytest.raises(ValueError, match="only once"):
            cache.append(*third, in_place=True)
        other = cache.append(*third)
        full = longer.append(*third, in_place=True)
        with pytest.raises(ValueError, match="fit into"):
            full.append(*rest, in_place=True)
        beyond = full.append(*rest)
    for some_cache, tokens in ((cache, 3), (longer, 5), (full, 6), (beyond, 7)):
        assert_holds(library, some_cache, arrays, tokens)
    np.testing.assert_array_equal(library.get(other.key)[:, :, 3], arrays["key"][:, :, 5])


def test_capacity_copies_the_prompt(library: Library, arrays: Arrays) -> None:
    """The caller's arrays are never written, nor do they show in the cache what is written to them."""
    if not can_write(library):
        pytest.skip("in place needs arrays that can be written to")
    first, second = parts(library, arrays, 0, 3, 5)
    kept = [library.get(x).copy() for x in first]
    for capacity in (3, 8):
        with library.guard():
            cache = KVCache(*first, capacity=capacity)
        if capacity == 8:
            with library.guard():
                cache = cache.append(*second, in_place=True)
        for x, before in zip(first, kept, strict=True):
            np.testing.assert_array_equal(library.get(x), before)
        if library.name in ("numpy", "torch"):
            assert not np.shares_memory(library.get(cache.key), library.get(first[0]))


def test_a_class_of_the_caller_keeps_what_it_has(arrays: Arrays) -> None:
    class Named(KVCache):
        name = ""

    first, second = parts(LIBRARIES["numpy"][1](), arrays, 0, 3, 5)
    cache = Named(*first)
    cache.name = "layer 0"
    for other in (cache.append(*second), cache.drop_last(1), cache.take_tokens([0]), cache.quantised("int8")):
        assert isinstance(other, Named)
        assert other.name == "layer 0"


@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_values_that_are_a_part_of_their_keys(library: Library, rng: np.random.Generator, layout: Any) -> None:
    """Attention is that of a cache which stores both, and what is done to it is done to the values too."""
    keys, query = (moved(x, layout) for x in draw(rng, (2, 1, 20, 12), (2, 4, 3, 12)))
    axis = -2 if layout == "...HLE" else -3
    old, new = np.split(keys, [17], axis=axis)

    def last_states(old: Any, new: Any, query: Any) -> list[Any]:
        latent = KVCache(old, value_width=8, layout=layout).append(new)
        both = KVCache(old, old[..., :8], layout=layout).append(new, new[..., :8])
        steps: list[Callable[[Any], Any]] = [
            lambda cache: cache,
            lambda cache: cache.drop_first(4),
            lambda cache: cache.take_tokens([1, 9, 3, 19]),
            lambda cache: cache.take_entries([1, 0]),
        ]
        assert latent.nbytes * 20 == both.nbytes * 12 or library.traces or library.lazy
        return [step(cache).attend(query) for step in steps for cache in (latent, both)]

    outputs = [library.get(x) for x in library.call(last_states, old, new, query)]
    for result, expected in zip(outputs[::2], outputs[1::2], strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_latent_cache_is_written_in_place_and_copied(rng: np.random.Generator) -> None:
    keys, query = draw(rng, (1, 9, 6), (2, 1, 6))
    cache = KVCache(keys[:, :1], value_width=4, capacity=9)
    for token in range(1, 9):
        cache = cache.append(keys[:, token : token + 1], in_place=True)
    assert np.shares_memory(cache.value, cache.key)
    for same in (cache, pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert repr(same) == "KVCache(key=<float32 (1, 9, 6)>, value_width=4)"
        np.testing.assert_array_equal(same.attend(query), KVCache(keys, keys[..., :4]).attend(query))
