"""Statistics of the tokens of a cache: those of the weights of `attend`, however the tokens are stored."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from agreement import BLOCK, OF, OF_CHUNKS, K, Results, assert_right, host
from calls import draw_named, moved
from libraries import Library

import sdpa_xp
from sdpa_xp import KVCache, PagedKVCache, biases, masks
from sdpa_xp.positional import Rotary

F = np.float32
QUERIES, TOKENS = 5, 12
I, J = np.arange(TOKENS - QUERIES, TOKENS)[:, None], np.arange(TOKENS)
SINKS = np.asarray([0.5, -3.0, 4.0, 1.0], F)
ALIBI = -(0.25 ** np.arange(1, 5, dtype=F))[:, None, None] * (I - J).astype(F)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "all pairs": ({"is_causal": False}, {"attn_mask": J < TOKENS}),
    "window and alibi": (
        {"attn_mask": masks.sliding_window(3, 0), "bias": biases.alibi(4), "softcap": 2.0},
        {"attn_mask": (J <= I) & (I - J <= 3), "bias": ALIBI, "softcap": 2.0},
    ),
    "sinks": ({"sinks": SINKS, "scale": 0.2}, {"sinks": SINKS, "scale": 0.2}),
}


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return draw_named(rng, {"query": (2, 4, QUERIES, 8), "key": (2, 2, TOKENS, 8), "value": (2, 2, TOKENS, 6)})


def statistics_of(library: Library, cache: KVCache[Any], query: Any, **rules: Any) -> Results:
    """All statistics that the library has, as NumPy arrays."""
    names: Any = {"of": OF_CHUNKS} if library.lazy else {"of": OF, "top_k": K, "block_size": BLOCK}
    with library.guard():
        rules = {name: library.put(x) if isinstance(x, np.ndarray) else x for name, x in rules.items()}
        computed = cache.statistics(query, **names, **rules)._asdict()
    top = computed.pop("top_keys")
    named = {name: x for name, x in computed.items() if x is not None}
    return host(library, **named, **({} if top is None else {f"top_{x}": y for x, y in top._asdict().items()}))


def cache_of(library: Library, key: np.ndarray, value: np.ndarray, layout: Any, **more: Any) -> KVCache[Any]:
    """A cache to which the last tokens were appended."""
    parts = [[library.put(moved(x[..., cut, :], layout)) for x in (key, value)] for cut in (J[:9], J[9:])]
    return KVCache(*parts[0], layout=layout, **more).append(*parts[1])


@pytest.mark.sampled(2, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_as_they_are(library: Library, arrays: dict[str, np.ndarray], case: str, layout: str) -> None:
    """Rotated, with masks and biases of positions; the last queries see all tokens before them."""
    rules, meaning = CASES[case]
    query, rotary = arrays["query"], Rotary(8)
    with library.guard():
        cache = cache_of(library, arrays["key"], arrays["value"], layout, rotary=rotary)
        placed = library.put(moved(query, layout))
        rotated = [library.get(rotary.apply(library.put(x), i)) for x, i in ((query, 7), (arrays["key"], 0))]
    call = {"query": rotated[0], "key": rotated[1], "value": arrays["value"], "attn_mask": J <= I}
    assert_right(statistics_of(library, cache, placed, **rules), call | meaning)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("query_dtype", ["float32", "float64"])
def test_tokens_stored_as_less(
    library: Library, arrays: dict[str, np.ndarray], query_dtype: str, quantised: bool
) -> None:
    """In float16 and as integers: the statistics are those of the numbers that these stand for."""
    library.needs("float16")
    library.needs(query_dtype)
    halves = [arrays[name].astype("float16") for name in ("key", "value")]
    tokens = halves if not quantised else [x.astype(query_dtype) for x in halves]
    with library.guard():
        cache = cache_of(library, *tokens, "...HLE")
        cache = cache.quantised("int8", per="channel") if quantised else cache
        key, query = library.get(cache.key), library.put(arrays["query"].astype(query_dtype))
    call = {
        "query": arrays["query"].astype(query_dtype),
        "key": key.astype(query_dtype),
        "value": arrays["value"],
    }
    results = statistics_of(library, cache, query)
    assert_right(
        results, {name: x.astype(query_dtype) for name, x in call.items()} | {"attn_mask": J <= I}, query_dtype
    )


def test_the_weights_of_a_token_say_what_to_evict(rng: np.random.Generator) -> None:
    """`key_sums` count slots, as `take_tokens` does, also if tokens before them were dropped."""
    key, value = rng.standard_normal((2, 1, 12, 8)).astype(F)
    key, value = key[None], value[None]
    cache = KVCache(key, value, capacity=20).drop_first(2)
    query = key[:, :, -1:]
    sums = cache.statistics(query, of="key_sums").key_sums
    weights = sdpa_xp.attention_weights(query, cache.key)
    np.testing.assert_allclose(sums, weights[..., 0, :], atol=1e-6)
    kept = np.sort(np.argsort(sums[0, 0])[1:])
    assert np.asarray(cache.take_tokens(kept).positions).tolist() == [int(n) + 2 for n in kept]


def test_inside_a_jit(library: Library, arrays: dict[str, np.ndarray]) -> None:
    library.needs_jit()

    def sums_of(query: Any, key: Any, value: Any) -> Any:
        return KVCache(key, value).statistics(query, of="key_sums").key_sums

    with library.guard():
        assert library.jit is not None
        sums = library.jit(sums_of)(*map(library.put, arrays.values()))
    assert_right({"key_sums": library.get(sums)}, {**arrays, "attn_mask": J <= I})


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_pages_of_integers(library: Library, arrays: dict[str, np.ndarray], dtype: Any) -> None:
    """The statistics are those of the same tokens in a cache without pages."""
    tokens = {name: np.repeat(arrays[name], 2, axis=0)[:3] for name in arrays}
    lengths, table = [TOKENS, 7, QUERIES], [[4, 0, 3], [1, 5], [2, 6]]
    pools = [np.full((7, *x.shape[1:2], 4, x.shape[-1]), np.nan, F) for x in (tokens["key"], tokens["value"])]
    for pool, x in zip(pools, (tokens["key"], tokens["value"]), strict=True):
        for row, entry, n in zip(table, x, lengths, strict=True):
            for t in range(n):
                pool[row[t // 4], :, t % 4] = entry[:, t]
    with library.guard():
        paged = PagedKVCache(*map(library.put, pools), table, lengths).quantised(dtype)
        computed = paged.statistics(library.put(tokens["query"]), of=OF_CHUNKS)
        results = {name: library.get(x) for name, x in computed._asdict().items() if x is not None}
        for n, length in enumerate(lengths):
            parts = [library.put(tokens[name][n : n + 1, :, :length]) for name in ("key", "value")]
            query = library.put(tokens["query"][n : n + 1])
            whole = KVCache(*parts).quantised(dtype).statistics(query, of=OF_CHUNKS)
            for name in OF_CHUNKS:
                here = results[name][n : n + 1, :, : length if name == "key_sums" else None]
                np.testing.assert_allclose(here, library.get(getattr(whole, name)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_the_arguments_are_those_of_both(kind: Any) -> None:
    """Of `attend`, without what weights do not have; and of the function."""
    method, attend, function = (
        inspect.signature(x).parameters for x in (kind.statistics, kind.attend, sdpa_xp.attention_statistics)
    )
    others = {"key", "layout", "dropout_p", "rng", "reproducible"}
    others |= set() if kind is KVCache else {"block_size"}
    assert {*method} == ({*attend} | {*function}) - others
