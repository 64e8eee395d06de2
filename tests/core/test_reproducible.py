"""`reproducible=True`: the bits of a row depend on nothing that stands beside it."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
from calls import bits
from internals import judge, reference, textbook
from libraries import Library
from threadpoolctl import threadpool_limits

import sdpa_xp
from sdpa_xp import KVCache, PagedKVCache, attention_state, biases, layers, masks, positional

attend = partial(sdpa_xp.scaled_dot_product_attention, reproducible=True)
DTYPES = ("float32", "float64", "float16")


def draw(rng: np.random.Generator, dtype: str = "float32", queries: int = 0) -> list[np.ndarray]:
    """Query, key and value with as many queries as keys, or `queries`; some rows have large scores."""
    batch, key_heads, group = (int(rng.integers(1, most)) for most in (4, 3, 4))
    width, value_width = (int(rng.choice([1, 8, 33, 64])) for _ in range(2))
    keys = int(rng.choice([1, 3, 40, 127, 128, 129, 300, 700]))
    query = rng.standard_normal((batch, key_heads * group, queries or keys, width))
    query *= rng.choice([1.0, 1.0, 60.0], size=query.shape[-2])[:, None]
    key = rng.standard_normal((batch, key_heads, keys, width))
    value = rng.standard_normal((batch, key_heads, keys, value_width))
    return [array.astype(dtype) for array in (query, key, value)]


def options(rng: np.random.Generator, query: np.ndarray, keys: int, first: int) -> dict[str, Any]:
    """Options of queries that begin at `first`: the same seed gives the same options."""
    heads, rules = query.shape[1], dict[str, Any]()
    kind = int(rng.integers(6))
    if kind == 1:
        rules["attn_mask"] = masks.causal(first)
    elif kind == 2:
        left, right = (int(rng.integers(200)) for _ in range(2))
        rules["attn_mask"] = masks.sliding_window(left, right, offset=first)
    elif kind == 3:
        rules["attn_mask"] = masks.causal(first) | masks.prefix(keys // 3)
    if rng.random() < 0.3:
        rules["softcap"] = 4.0
    if rng.random() < 0.3:
        rules["sinks"] = rng.standard_normal(heads).astype(query.dtype)
    if rng.random() < 0.3:
        rules["scale"] = -0.3
    if rng.random() < 0.3:
        slopes = rng.random(heads).astype(query.dtype)
        rules["bias"] = biases.alibi(slopes, offset=first)
    return rules


@pytest.mark.parametrize("seed", range(24))
def test_a_part_of_a_call_has_the_bits_of_the_whole(seed: int) -> None:
    """One batch entry and some of its queries, alone."""
    rng = np.random.default_rng(seed)
    query, key, value = draw(rng, DTYPES[seed % 3])
    whole = attention_state(
        query, key, value, **options(np.random.default_rng(seed), query, key.shape[2], 0), reproducible=True
    )
    for _ in range(4):
        entry = int(rng.integers(len(query)))
        first = int(rng.integers(query.shape[2]))
        rows = slice(first, first + int(rng.choice([1, 1, 2, 5, 60])))
        rules = options(np.random.default_rng(seed), query, key.shape[2], first)
        part = attention_state(query[entry, :, rows], key[entry], value[entry], **rules, reproducible=True)
        assert bits(part) == bits(whole, np.s_[entry, :, rows])


@pytest.mark.parametrize("seed", range(6))
def test_padding_and_what_it_holds_change_no_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    query, key, value = draw(rng)
    lengths = [int(n) for n in rng.integers(1, key.shape[2] + 1, size=len(query))]
    for entry, length in enumerate(lengths):
        key[entry, :, length:], value[entry, :, length:] = np.nan, np.inf
    padded = attend(query, key, value, masks.padding(lengths), is_causal=True)
    for entry, length in enumerate(lengths):
        alone = attend(*(array[entry, :, :length] for array in (query, key, value)), is_causal=True)
        assert alone.tobytes() == padded[entry, :, :length].tobytes()


def in_pages(rng: np.random.Generator, array: np.ndarray, size: int) -> tuple[np.ndarray, list[list[int]]]:
    """Return (N, H, S, width) as a pool of blocks in an order of their own, and the table of the blocks."""
    batch, heads, keys, width = array.shape
    count = -(-keys // size)
    padded = np.zeros((batch, heads, count * size, width), array.dtype)
    padded[:, :, :keys] = array
    blocks = padded.reshape(batch, heads, count, size, width).swapaxes(1, 2).reshape(-1, heads, size, width)
    places = rng.permutation(len(blocks))
    pool = np.empty_like(blocks)
    pool[places] = blocks
    return pool, places.reshape(batch, count).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_a_prompt_in_chunks_and_a_decoder_have_the_bits_of_one_call(seed: int) -> None:
    rng = np.random.default_rng(seed)
    query, key, value = draw(rng, DTYPES[seed % 3])
    whole = attend(query, key, value, is_causal=True)
    size, first = int(rng.choice([1, 4, 16, 100])), 0
    cache = KVCache(key[:, :, :0], value[:, :, :0])
    keys_in_pages, table = in_pages(np.random.default_rng(seed), key, size)
    values_in_pages, _ = in_pages(np.random.default_rng(seed), value, size)
    while first < query.shape[2]:
        last = min(query.shape[2], first + int(rng.choice([1, 1, 7, 130])))
        tokens = slice(first, last)
        cache = cache.append(key[:, :, tokens], value[:, :, tokens])
        paged = PagedKVCache(keys_in_pages, values_in_pages, table, [last] * len(query))
        expected = whole[:, :, tokens].tobytes()
        assert cache.attend(query[:, :, tokens], reproducible=True).tobytes() == expected
        assert paged.attend(query[:, :, tokens], reproducible=True).tobytes() == expected
        state = paged.attend_state(query[:, :, tokens], reproducible=True)
        assert state.output.tobytes() == expected
        assert state.lse.tobytes() == cache.attend_state(query[:, :, tokens], reproducible=True).lse.tobytes()
        first = last


@pytest.mark.parametrize("order", ["keys first", "width apart", "read backwards", "shared rows"])
def test_the_order_in_memory_changes_no_bit(rng: np.random.Generator, order: str) -> None:
    query, key, value = (rng.standard_normal((2, 3, 300, 64)).astype("float32") for _ in range(3))
    if order == "shared rows":
        key[:] = key[:, :, :1]
    expected = attend(query, key, value).tobytes()

    def moved(array: np.ndarray) -> np.ndarray:
        if order == "keys first":
            return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
        if order == "width apart":
            return np.repeat(array, 2, axis=-1)[..., ::2]
        return np.ascontiguousarray(array[..., ::-1, :])[..., ::-1, :]

    parts = [moved(array) for array in (query, key, value)]
    if order == "shared rows":
        parts = [query, np.broadcast_to(key[:, :, :1], key.shape), value]
    assert attend(*parts).tobytes() == expected


@pytest.mark.parametrize("name", ["attn_mask", "bias", "scale", "both", "none"])
@pytest.mark.parametrize(("size", "keys"), [(1, 130), (60, 130), (1, 700)])
def test_values_with_a_batch_of_their_own(rng: np.random.Generator, name: str, size: int, keys: int) -> None:
    """Weights get the batch from a mask or a bias, and its order in memory: here the batch lies innermost."""
    query, key = (size * rng.standard_normal((1, 2, n, 33), "float32") for n in (130, keys))
    value = rng.standard_normal((5, 2, keys, 8), "float32")
    allowed, bias = rng.random((keys, 130, 2, 5)) < 0.7, rng.standard_normal((keys, 130, 2, 5), "float32")
    rules: dict[str, np.ndarray] = {
        "attn_mask": np.where(allowed, bias, -np.inf) if name == "both" else allowed,
        "bias": bias,
        "scale": rng.random((1, 130, 2, 5), "float32"),
    }
    rules = {key: x.T for key, x in rules.items() if name in (key, "both")}
    if name == "none":
        query, key = query[0], key[0]
    whole = attention_state(query, key, value, **rules, reproducible=True)
    for entry in range(5):
        alone = {key: x[entry].copy() for key, x in rules.items()}
        state = attention_state(
            *(x.reshape(2, -1, 33) for x in (query, key)), value[entry], **alone, reproducible=True
        )
        assert bits(state) == bits(whole, np.s_[entry])


@pytest.mark.parametrize(("queries", "heads"), [(1, 1), (1, 3), (5, 2)])
def test_many_tiles_of_keys_are_added_as_few_are(rng: np.random.Generator, queries: int, heads: int) -> None:
    """A window reads few tiles of keys at once; all others have weight 0, which is added without an effect."""
    query = rng.standard_normal((heads, queries, 16), "float32")
    key, value = (rng.standard_normal((heads, 4000, 16), "float32") for _ in range(2))
    window = masks.sliding_window(300, 0, offset=3990 - queries)
    allowed = np.asarray(masks.to_array(window, (queries, 4000)))
    windowed = attention_state(query, key, value, window, reproducible=True)
    masked = attention_state(query, key, value, np.asarray(allowed), reproducible=True)
    assert bits(windowed) == bits(masked)
    prefix = attention_state(query, key[:, :300], value[:, :300], reproducible=True)
    wide = attention_state(query, key, value, masks.padding([300]), reproducible=True)
    assert bits(prefix) == bits(wide)
    rows = rng.standard_normal((heads, 100, 16), "float32")  # which read the keys in several parts
    rows[:, -queries:] = query
    together = attention_state(rows, key, value, reproducible=True)
    alone = attention_state(query, key, value, reproducible=True)
    assert bits(together, np.s_[:, -queries:]) == bits(alone)


@pytest.mark.parametrize("width", [64, 600])
def test_threads_change_no_bit(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    query, key, value = (rng.standard_normal((2, 4, 300, width)).astype("float32") for _ in range(3))
    results = set()
    for threads in (1, 2, 3):
        monkeypatch.setenv("SDPA_XP_NUM_THREADS", str(threads))
        with threadpool_limits(threads, user_api="blas"):
            whole = attend(query, key, value, is_causal=True)
            few = attend(query[:, :, -2:], key, value, masks.causal(298))
        assert few.tobytes() == whole[:, :, -2:].tobytes()
        results.add(whole.tobytes())
    assert len(results) == 1


ELSEWHERE = "strict-device1 strict-no_x64 cupy cupy-rules cupy-rules-device1 torch-cuda torch-cuda-rules"
REFUSING = dict.fromkeys(ELSEWHERE.split(), "on another device") | {
    "jax-jit": "have no values yet",
    "dask": "have no values yet",
    "mlx": "does not show whether it needs them",
}
"""The libraries that cannot promise it, with a part of the reason."""


@pytest.mark.sampled(1)
def test_each_library_keeps_the_bits_or_refuses_by_name(library: Library, rng: np.random.Generator) -> None:
    query, key, value = draw(rng)
    slopes = rng.random(query.shape[1]).astype("float32")
    mask = rng.random((query.shape[2], key.shape[2])) < 0.8

    def state(*arrays: Any, slopes: Any, mask: Any) -> Any:
        bias = biases.alibi(slopes)
        return attention_state(*arrays, mask, bias=bias, is_causal=True, reproducible=True)

    expected = state(query, key, value, slopes=slopes, mask=mask)
    call = partial(library.call, state, query, key, value, slopes=slopes, mask=mask)
    if library.name in REFUSING:
        with pytest.raises(ValueError, match=REFUSING[library.name]):
            call()
        return
    result = call()
    for part, wanted in zip(result, expected, strict=True):
        assert type(part) is type(library.put(query))
        assert library.get(part).tobytes() == wanted.tobytes()


@pytest.mark.sampled(0, on="EAGER_JAX")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_each_library_gets_its_dtype_back(library: Library, rng: np.random.Generator, dtype: str) -> None:
    if library.name in REFUSING:
        pytest.skip("it refuses")
    library.needs(dtype)
    arrays = dict(zip(("query", "key", "value"), draw(rng), strict=True))
    halves = {name: array.astype(dtype) for name, array in arrays.items()}
    result = library.call(attend, **halves)
    with library.guard():
        assert result.dtype == library.put(halves["query"]).dtype
    wide = attend(*(array.astype("float64" if dtype == "float64" else "float32") for array in halves.values()))
    np.testing.assert_array_equal(library.get(result), wide.astype(dtype))


@pytest.mark.parametrize("seed", range(6))
def test_the_numbers_are_as_near_as_those_of_the_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 3]
    query, key, value = draw(rng, dtype)
    value[..., 0] = 0
    arrays = {"query": query, "key": key, "value": value}
    rules = {"is_causal": True, "scale": float(rng.choice([0.1, 1.0, -1.0]))}
    expected, lse, _ = reference.attention(**arrays, **rules)
    state = attention_state(**arrays, **rules, reproducible=True)
    agreement = judge(state.output, expected, textbook(np, **arrays, **rules), dtype)
    assert agreement.agrees, agreement
    np.testing.assert_allclose(state.lse, lse, rtol=1e-5)


@pytest.mark.parametrize("score", [-300.0, -40.0, 300.0])
def test_a_row_whose_scores_are_all_far_from_0(rng: np.random.Generator, score: float) -> None:
    """Its weights underflow or overflow without a maximum."""
    key, value = np.ones((1, 9, 4), "float32"), rng.standard_normal((1, 9, 4), "float32")
    query = np.full((1, 3, 4), [[0.0], [score / 4], [0.0]], "float32")
    state = attention_state(query, key, value, scale=1.0, reproducible=True)
    np.testing.assert_allclose(
        state.output, np.repeat(value.mean(1, keepdims=True), 3, axis=1), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(state.lse[0], np.asarray([0.0, score, 0.0]) + np.log(9), rtol=1e-6)


def test_a_nan_shows_in_the_rows_that_attend_to_it(rng: np.random.Generator) -> None:
    query, key, value = (rng.standard_normal((1, 2, 300, 8)).astype("float32") for _ in range(3))
    clean = attend(query, key, value, is_causal=True)
    value[:, :, 140, 3], key[:, 1, 141] = np.inf, np.nan
    result = attend(query, key, value, is_causal=True)
    assert result[:, :, :140].tobytes() == clean[:, :, :140].tobytes()
    assert np.isinf(result[0, 0, 140:, 3]).all()
    assert np.isnan(result[0, 1, 141:]).all()
    np.testing.assert_allclose(result[0, 0, :, :3], clean[0, 0, :, :3], rtol=1e-5, atol=1e-6)


def test_an_infinite_value_with_a_weight_that_underflows(rng: np.random.Generator) -> None:
    """It shows in the same way beside a masked key, which has every pair looked at, and alone."""
    query, key, value = (rng.standard_normal((2, 40, 8)).astype("float32") for _ in range(3))
    value[:, 3, 5] = np.inf
    alone, wide = attend(60 * query, key, value), [np.pad(x, ((0, 0), (0, 1), (0, 0))) for x in (key, value)]
    assert attend(60 * query, *wide, masks.padding(40)).tobytes() == alone.tobytes()
    assert (alone[..., 5] == np.inf).all()


def test_rows_without_keys(rng: np.random.Generator) -> None:
    query, key, value = (rng.standard_normal((2, 5, 8)).astype("float32") for _ in range(3))
    state = attention_state(query, key, value, masks.causal(-2), reproducible=True)
    assert not state.output[:, :2].any()
    assert (state.lse[:, :2] == -np.inf).all()
    assert attend(query, key[:, :0], value[:, :0]).tobytes() == np.zeros_like(query).tobytes()


def test_values_without_elements(rng: np.random.Generator) -> None:
    arrays = [rng.standard_normal((4, 300, 8)) for _ in range(3)]
    state = attention_state(*arrays, is_causal=True, reproducible=True)
    empty = attention_state(*arrays[:2], arrays[2][..., :0], is_causal=True, reproducible=True)
    assert empty.output.shape == (4, 300, 0)
    assert empty.lse.tobytes() == state.lse.tobytes()


KEEPING = (
    "scaled_dot_product_attention attention_state varlen_attention varlen_attention_state "
    "KVCache.attend KVCache.attend_state PagedKVCache.attend PagedKVCache.attend_state"
)
"""What keeps the promise: tests here, and of `test_reproducible_places`, call each of them."""
PASSING_ON = [
    f"{layer}.{method}"
    for layer in ("MultiHeadAttention", "SingleHeadAttention")
    for method in ("__call__", "state", "weights", "attend")
]
"""The keywords of layers, where a test finds the refusal."""


def test_no_other_function_takes_it() -> None:
    """Nor one that passes all keywords on; `explain` tells of it."""
    taking, passing = set(), set()
    for value in (getattr(m, name) for m in (sdpa_xp, layers, positional, masks, biases) for name in m.__all__):
        methods = vars(value) | vars(value.__mro__[1]) if inspect.isclass(value) else {"": value}
        for method, function in methods.items():
            if not inspect.isroutine(function) or (method.startswith("_") and method != "__call__"):
                continue
            parameters = inspect.signature(getattr(function, "__func__", function)).parameters.values()
            full = f"{value.__name__}.{method}".rstrip(".")
            taking |= {full for parameter in parameters if parameter.name == "reproducible"}
            passing |= {full for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD}
    assert taking == {"explain", *KEEPING.split()}
    assert passing == {*PASSING_ON}


@pytest.mark.parametrize("method", ["__call__", "state", "weights", "attend"])
@pytest.mark.parametrize("kind", [layers.MultiHeadAttention, layers.SingleHeadAttention])
def test_layers_refuse_it(kind: Any, method: str) -> None:
    """Their projections are products of any shape."""
    rng, words = np.random.default_rng(0), np.ones((2, 5, 16), "float32")
    is_single = kind is layers.SingleHeadAttention
    layer = kind.init(rng, 16, **({"attention_dim": 16} if is_single else {"num_heads": 4}))
    cache = (KVCache(*layer.project_key_value(words)),) if method == "attend" else ()
    call = getattr(layer, method)
    with pytest.raises(ValueError, match="reproducible"):
        call(words, *cache, reproducible=True)
    if method != "weights":
        np.testing.assert_array_equal(call(words, *cache, reproducible=False)[0], call(words, *cache)[0])


@pytest.mark.needs("torch")
def test_derivatives_are_refused() -> None:
    import torch

    query = torch.ones(1, 3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="torch records"):
        attend(query, query, query)
    with torch.no_grad():
        assert attend(query, query, query).shape == query.shape
