"""Queries wider than what a cache stores: exactly what a cache of the same numbers in their dtype gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import assert_agrees, draw_named, gradients, moved, tracer_of
from internals import reference
from libraries import Library

from sdpa_xp import KVCache, PagedKVCache, biases, masks
from sdpa_xp.positional import Rotary

KINDS = [("float16", "float32"), ("bfloat16", "float32"), ("float16", "float64"), ("float32", "float64")]
SHAPES = {"query": (2, 4, 5, 8), "key": (2, 2, 12, 8), "value": (2, 2, 12, 6)}
WINDOW = (np.arange(12) <= np.arange(7, 12)[:, None]) & (np.arange(12) >= np.arange(3, 8)[:, None])
RULES: dict[str, Any] = {"attn_mask": masks.sliding_window(4, 0), "bias": biases.alibi(4), "softcap": 3.0}
ALIBI = -(0.25 ** np.arange(1.0, 5))[:, None, None] * (np.arange(7, 12)[:, None] - np.arange(12))
TABLE: Any = [[1, 4, 2], [0, 5, 3]]

Made = Callable[..., Any]


def contiguous(put: Any, key: np.ndarray, value: np.ndarray, layout: Any, **more: Any) -> Any:
    return KVCache(put(moved(key, layout)), put(moved(value, layout)), layout=layout, **more)


def paged(put: Any, key: np.ndarray, value: np.ndarray, layout: Any, **more: Any) -> Any:
    pools = []
    for tokens in (key, value):
        pool = np.zeros((6, 2, 4, tokens.shape[-1]), tokens.dtype)
        for row, sequence in zip(TABLE, tokens, strict=True):
            for place, block in enumerate(row):
                pool[block] = sequence[:, 4 * place : 4 * place + 4]
        pools.append(put(moved(pool, layout)))
    more.pop("rotated", None)
    return PagedKVCache(*pools, TABLE, [12, 12], layout=layout, **more)


def drawn(rng: np.random.Generator, stored: str, query_dtype: str) -> tuple[dict[str, np.ndarray], Any]:
    """A call of the numbers in the wider dtype, and the keys and values as they are stored."""
    call = draw_named(rng, SHAPES, np.float64)
    narrow = [call[name].astype(stored) for name in ("key", "value")]
    call = {"query": call["query"], "key": narrow[0], "value": narrow[1]}
    return {name: x.astype(query_dtype) for name, x in call.items()}, narrow


@pytest.mark.sampled(3, on="EAGER_JAX")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize(("stored", "query_dtype"), KINDS)
def test_each_dtype(
    library: Library, rng: np.random.Generator, stored: str, query_dtype: str, make: Made, layout: str
) -> None:
    """Output and log-sum-exp, rotated, with a mask, a bias and a soft cap, are those of wider keys."""
    library.needs(stored)
    library.needs(query_dtype)
    call, narrow = drawn(rng, stored, query_dtype)
    rotary = Rotary(8)
    with library.guard():
        rotated = library.get(rotary.apply(library.put(call["query"]), 7))
        cache = make(library.put, *narrow, layout, rotary=rotary, rotated=True)
        query = library.put(moved(call["query"], layout))
        state, output = cache.attend_state(query, **RULES), cache.attend(query, **RULES)
    assert state.output.dtype == output.dtype == query.dtype
    call |= {"query": rotated, "attn_mask": WINDOW, "bias": ALIBI.astype(query_dtype)}
    for result in (state.output, output):
        assert_agrees(library, moved(library.get(result), layout), call, softcap=3.0)
    lse, expected = library.get(state.lse), reference.attention(**call, softcap=3.0)[1]
    assert lse.dtype == query_dtype
    np.testing.assert_allclose(lse, expected, rtol=1e-5 if query_dtype == "float32" else 1e-14, atol=1e-6)


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("rules", [{}, RULES, {"reproducible": True}], ids=["plain", "rules", "reproducible"])
def test_the_bits_of_a_cache_in_the_dtype_of_the_query(
    rng: np.random.Generator, make: Made, rules: dict[str, Any]
) -> None:
    """Where both have the same tiles; also for tokens that were appended in place, and for packed queries."""
    call, narrow = drawn(rng, "float16", "float32")
    token = [x[:, :, -1:] for x in narrow]
    results = []
    for dtype in ("float16", "float32"):
        cache = make(np.asarray, *(x[:, :, :12].astype(dtype) for x in narrow), "...HLE")
        if make is contiguous:
            cache = make(np.asarray, *(x[:, :, :11].astype(dtype) for x in narrow), "...HLE", capacity=12)
            cache = cache.append(*(x.astype(dtype) for x in token), in_place=True)
        results.append([*cache.attend_state(call["query"], **rules)])
        if make is paged:
            packed = np.concatenate([*call["query"]], axis=1)
            results[-1] += cache.attend_state(packed, cu_seqlens_q=[0, 5, 10], **rules)
    for narrow_result, wide in zip(*results, strict=True):
        np.testing.assert_array_equal(narrow_result, wide)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("make", [contiguous, paged])
def test_numpy_computes_reproducible_calls_of_torch(rng: np.random.Generator, make: Made) -> None:
    import torch

    call, narrow = drawn(rng, "float16", "float32")
    outputs = [
        make(put, *narrow, "...HLE").attend(put(call["query"]), reproducible=True)
        for put in (torch.asarray, np.asarray)
    ]
    assert outputs[0].dtype == torch.float32
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised(library: Library, rng: np.random.Generator, make: Made, dtype: Any) -> None:
    """Codes and scales of half tokens are read as they are, and rounded to no half on the way."""
    library.needs("float16")
    call, (key, value) = drawn(rng, "float16", "float32")
    outputs = []
    for x in (np.asarray, library.put):
        with library.guard():
            cache = make(x, key, value, "...HLE").quantised(dtype)
            outputs.append(cache.attend(x(call["query"])))
    assert outputs[1].dtype == library.put(call["query"]).dtype
    np.testing.assert_allclose(library.get(outputs[1]), outputs[0], atol=2e-6)


def test_values_that_are_a_part_of_their_keys(library: Library, rng: np.random.Generator) -> None:
    library.needs("float16")
    call, (key, _) = drawn(rng, "float16", "float32")
    with library.guard():
        output = KVCache(library.put(key), value_width=6).attend(library.put(call["query"]))
    call |= {"value": call["key"][..., :6], "attn_mask": np.tri(5, 12, 7, bool)}
    assert_agrees(library, library.get(output), call)


@pytest.mark.leaves_out("torch-cuda-rules", "torch-inference")
@pytest.mark.parametrize("tokens", [12, 400])
def test_gradients_have_the_dtypes_of_their_arrays(
    library: Library, rng: np.random.Generator, tokens: int
) -> None:
    """Of a short call and of one that torch differentiates as one operation; a key gets a rounded gradient."""
    library.needs("float16")
    shapes = {"query": (1, 4, tokens, 8), "key": (1, 2, tokens, 8), "value": (1, 2, tokens, 6)}
    arrays = draw_named(rng, shapes)
    narrow = [arrays[name].astype("float16") for name in ("key", "value")]
    xp = library.xp

    def loss(query: Any, key: Any, value: Any) -> Any:
        state = KVCache(key, value).attend_state(query)
        return xp.sum(xp.sin(state.output)) + xp.sum(state.lse)

    got = gradients(library, loss, arrays["query"], *narrow)
    wide = gradients(library, loss, arrays["query"], *(x.astype("float32") for x in narrow))
    assert [x.dtype.name for x in got] == ["float32", "float16", "float16"]
    largest = [np.abs(x).max() for x in wide]
    for gradient, expected, size, least in zip(got, wide, largest, (1e-6, 2e-3, 2e-3), strict=True):
        np.testing.assert_allclose(gradient.astype("float32"), expected, atol=least * size, rtol=0)


@pytest.mark.leaves_out("torch-cuda-rules", "torch-inference")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("tokens", [5, 12])
def test_inside_a_trace(library: Library, rng: np.random.Generator, tokens: int) -> None:
    """Also where all tokens of the cache are queries, so that none stands before them."""
    library.needs("float16")
    call, narrow = drawn(rng, "float16", "float32")
    narrow = [x[:, :, :tokens] for x in narrow]

    def attended(query: Any, key: Any, value: Any) -> Any:
        state = KVCache(key, value).attend_state(query, masks.sliding_window(4, 0))
        return state.output, state.lse

    with library.guard():
        arrays = [library.put(x) for x in (call["query"], *narrow)]
        if library.name.partition("-")[0] == "torch":
            arrays = [x.requires_grad_() for x in arrays]  # which makes it an operation of torch
        traced, eager = tracer_of(library)(attended)(*arrays), attended(*arrays)
    for result, expected in zip(traced, eager, strict=True):
        got, near = (library.get(x.detach() if hasattr(x, "detach") else x) for x in (result, expected))
        np.testing.assert_allclose(got, near, atol=2e-6)
