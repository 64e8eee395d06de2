"""Lists of keys, against the boolean array of the same pairs: by tiles, and by copies of the listed keys."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np
import pytest
from calls import draw
from internals import override
from libraries import Library

from sdpa_xp import KVCache, attention_state, attention_statistics, explain, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_jvp as jvp
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

L, S = 30, 301


class Case(NamedTuple):
    """Lists of one call with 4 query heads, and another mask."""

    lists: tuple[int, ...]
    """The shape before the lists, (..., h)."""
    key_heads: int = 2
    block_size: tuple[int, int] = (1, 1)
    other: masks.Mask | None = None
    patched: bool = True
    """Whether the listed keys are copied."""


CASES = {
    "for all": Case(()),
    "of entries": Case((2, 1), 1),
    "of query heads": Case((4,)),
    "of key heads": Case((1, 2), other=masks.causal("lower_right")),
    "of few heads": Case((2, 2), 4, other=masks.sliding_window(40, 3) | masks.prefix(250)),
    "of blocks": Case((2, 4), 1, (4, 7), masks.causal(270)),
    "blocks of keys": Case((2,), 2, (1, 5), ~masks.chunked(90)),
    "with lengths of entries": Case((2, 1), other=masks.padding([200, 301]), patched=False),
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies for small calls too, of a few blocks at a time."""
    override(monkeypatch, "LEAST_PATCHED_PAIRS", 0)
    override(monkeypatch, "COST_OF_A_COPY", -100)
    override(monkeypatch, "MOST_GATHERED", 2000)


def pairs(
    lists: np.ndarray, block_size: tuple[int, int] = (1, 1), queries: int = L, keys: int = S
) -> np.ndarray:
    """Which pairs of 4 heads the lists name."""
    lists = lists if lists.ndim > 2 else lists[None]
    rows, columns = block_size
    is_listed = (lists[..., None] == np.arange(-(-keys // columns))).any(axis=-2)
    is_listed = is_listed.repeat(rows, axis=-2)[..., :queries, :].repeat(columns, axis=-1)[..., :keys]
    return is_listed.repeat(4 // is_listed.shape[-3], axis=-3)


def drawn(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Lists with padding, repeated indices, and an empty list."""
    rows, columns = case.block_size
    lists = rng.integers(-1, -(-S // columns), (*case.lists, -(-L // rows), 4)).astype(np.int32)
    lists[..., 1, :] = -1
    lists[..., 3, 2:] = lists[..., 3, :2]
    lists[lists == 2] = -5  # so that no query attends to key 2, nor to its block
    return lists


@pytest.mark.leaves_out("jax-debug")  # it refuses NaN
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_array(rng: np.random.Generator, library: Library, name: str) -> None:
    """Output and log-sum-exp; a NaN that no list names stays hidden, and one that a list names shows there."""
    case = CASES[name]
    lists, heads = drawn(rng, case), case.key_heads
    query, key, value = draw(rng, (2, 4, L, 8), (2, heads, S, 8), (heads, S, 5))
    key[..., 2 * case.block_size[1], :] = np.nan
    with library.guard():
        mask = masks.keys(library.put(lists), case.block_size)
        allowed = pairs(lists, case.block_size)
        if case.other is not None:
            mask, allowed = mask & case.other, allowed & masks.to_array(case.other, (2, 4, L, S))
    if not library.traces:
        value[..., np.nonzero(allowed)[-1][0], :] = np.nan
    if not (library.traces or library.lazy):
        plan = explain(*map(library.put, (query, key, value)), attn_mask=mask, implementation="xp")
        assert case.patched != bool(plan.tile_map)
    expected = attention_state(query, key, value, allowed)
    assert library.traces == np.isfinite(expected.output).all()
    result = library.call(attention_state, query, key, value, attn_mask=mask)
    for computed, right in zip(result, expected, strict=True):
        np.testing.assert_allclose(library.get(computed), right, atol=1e-5)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", CASES)
def test_derivatives_and_statistics(rng: np.random.Generator, name: str) -> None:
    case = CASES[name]
    lists, heads = drawn(rng, case), case.key_heads
    arrays = [np.asarray(x, np.float64) for x in draw(rng, (2, 4, L, 8), (2, heads, S, 8), (2, heads, S, 5))]
    mask, array = masks.keys(lists, case.block_size), pairs(lists, case.block_size)
    cotangent = np.ones((2, 4, L, 5))
    gradients, expected = (vjp(*arrays, x)[1](cotangent) for x in (mask, array))
    tangents = {"query": arrays[0], "key": arrays[1]}
    results = [jvp(*arrays, tangents, x)[1] for x in (mask, array)]
    sums = [attention_statistics(*arrays[:2], of="key_sums", attn_mask=x).key_sums for x in (mask, array)]
    for computed, right in (results, sums, *((gradients[n], expected[n]) for n in gradients)):
        np.testing.assert_allclose(computed, right, atol=1e-12)


@pytest.mark.parametrize("appended", [0, 7])
def test_a_cache_counts_its_tokens(rng: np.random.Generator, appended: int) -> None:
    """Also behind tokens that were dropped; of new queries there are lists alone."""
    query, key, value = draw(rng, (2, 4, L, 8), (2, 2, S + 9, 8), (2, 2, S + 9, 5))
    lists = rng.integers(-1, S, (2, 2, L, 4))
    first, last = ((x[..., : S + 9 - appended, :], x[..., S + 9 - appended :, :]) for x in (key, value))
    cache = KVCache(first[0], last[0], capacity=400).append(first[1], last[1]).drop_first(9)
    allowed = pairs(lists) & masks.to_array(masks.causal(S - L), (L, S))
    expected = scaled_dot_product_attention(query, key[..., 9:, :], value[..., 9:, :], allowed)
    np.testing.assert_allclose(cache.attend(query, masks.keys(lists)), expected, atol=1e-6)


def test_the_work_is_that_of_the_lists(rng: np.random.Generator) -> None:
    """For 128,000 tokens: no tile of all pairs, and at most a product of each query with its list."""
    x, lists = np.broadcast_to(np.zeros(1, np.float32), (1, 128_000, 8)), rng.integers(0, 128_000, (128_000, 4))
    plan = explain(x, x, x, masks.keys(lists) & masks.causal())
    assert plan.multiplications == 128_000 * 4 * (8 + 8)
    assert not plan.tile_map


@pytest.mark.needs("jax")
def test_a_jit_takes_an_index_beyond_the_keys_as_padding(rng: np.random.Generator) -> None:
    """In loops over tiles, and in copies; an eager call refuses it."""
    jax: Any = importlib.import_module("jax")
    for length, places in ((40, "one tile"), (2304, "copies")):
        x, lists = draw(rng, (2, length, 4))[0], rng.integers(-1, 2 * length, (length, 3))
        lists[0] = [length, 2**29, -1]
        program = jax.jit(lambda x, lists: scaled_dot_product_attention(x, x, x, masks.keys(lists)))
        is_listed = (lists[..., None] == np.arange(length)).any(axis=-2)
        expected = scaled_dot_product_attention(x, x, x, is_listed)
        assert ("gather" in str(jax.make_jaxpr(program)(x, lists))) or places == "one tile"
        np.testing.assert_allclose(program(x, lists), expected, atol=1e-5)
        with pytest.raises(ValueError, match="must be below S"):
            scaled_dot_product_attention(x, x, x, masks.keys(lists))


@pytest.mark.parametrize("number", [-(2**32) + 2, -(2**40) + 3, -(2**63)])
def test_a_number_far_below_0_is_padding(number: int) -> None:
    """Not the key that is left of it in 32 bits."""
    x = np.arange(1, 7, dtype=np.float32)[:, None]
    assert not scaled_dot_product_attention(x, x, x, masks.keys(np.full((6, 1), number))).any()


@pytest.mark.parametrize("sizes", [(2, 3, 4, 0), (2, 3, 0, 2), (2, 0, 4, 2), (0, 3, 4, 2), (2, 3, 0, 0)])
def test_lists_queries_keys_and_batches_may_be_empty(
    library: Library, sizes: tuple[int, int, int, int]
) -> None:
    batch, queries, keys, count = sizes
    query, key = (np.ones((batch, 2, length, 4), np.float32) for length in (queries, keys))
    for leading in ((), (1,), (batch, 2)):
        with library.guard():
            mask = masks.keys(library.put(np.full((*leading, queries, count), -1, np.int32))) & masks.causal()
        output, lse = library.call(attention_state, query, key, key, attn_mask=mask)
        assert library.get(output).shape == query.shape
        assert not library.get(output).any()
        assert np.isneginf(library.get(lse)).all()
