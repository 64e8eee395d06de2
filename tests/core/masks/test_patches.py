"""Neighbours in space, computed in patches of queries that each read a list of keys."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from calls import draw
from internals import PatchSize, grid_of, override, scores
from libraries import Library
from places import drawn_neighbourhoods, neighbours

from sdpa_xp import attention_state, biases, explain, masks, scaled_dot_product_attention
from sdpa_xp import scaled_dot_product_attention_vjp as vjp

CASES: list[tuple[Any, ...]] = [
    # shape, window, dilation, periodic, causal, borders, query heads for each of 2 key heads
    ((9, 11), (3, 5), (1, 1), (False, False), (False, False), "shifted", 1),
    ((12, 9), (3, 3), (2, 1), (False, True), (False, False), "cut", 3),
    ((5, 6, 7), (3, 3, 3), (1, 1, 1), (False, True, False), (False, False, False), "shifted", 1),
    ((70,), (5,), (3,), (False,), (False,), "shifted", 2),
    ((9, 11), (3, 4), (1, 1), (False, False), (True, False), "shifted", 1),
    ((12, 8), (4, 2), (1, 2), (False, True), (False, False), "cut", 2),
]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches of a few queries for small calls too, a few patches in a tile."""
    override(monkeypatch, "LEAST_PATCHED_PAIRS", 0)
    override(monkeypatch, "COST_OF_A_COPY", -100)
    override(monkeypatch, "MOST_GATHERED", 2000)


def is_patched(*arrays: Any, **rules: Any) -> bool:
    """Whether the keys of a tile are a list."""
    return not explain(*arrays, implementation="xp", **rules).tile_map


@pytest.mark.parametrize("case", drawn_neighbourhoods(80), ids=str)
@pytest.mark.parametrize("least", [1, 4])
def test_a_patch_has_the_neighbours_of_its_queries(
    monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], least: int
) -> None:
    override(monkeypatch, "ONE_CORE_PATCH", PatchSize(least, 20))
    mask: Any = masks.neighbourhood(**case)
    places = math.prod(case["shape"])
    grid = grid_of("test", "mask", (places, places), [], None)
    patches = mask.patches(grid)
    queries, keys, order, *_ = patches.key_lists(grid)
    assert (*queries.shape, keys.shape[1]) == (patches.blocks, patches.queries, patches.keys)
    np.testing.assert_array_equal(queries.reshape(-1)[order], np.arange(places))
    allowed = neighbours(**case)
    for of_block, others in zip(queries, keys, strict=True):
        assert len({*others}) == len(others)
        assert {*np.nonzero(allowed[of_block].any(axis=0))[0]} <= {*others}


@pytest.mark.leaves_out("jax-debug")  # it refuses NaN
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_the_array(rng: np.random.Generator, library: Library, case: Any) -> None:
    """Output, log-sum-exp and gradients; also if keys and values share a batch, and one of each is NaN."""
    *case, group = case
    names = ("shape", "window", "dilation", "periodic", "causal", "borders")
    mask = masks.neighbourhood(**dict(zip(names, case, strict=True)))
    places, array = math.prod(case[0]), neighbours(*case)
    query, key, value = draw(rng, (2, 2 * group, places, 4), (2, places, 4), (1, 2, places, 3))
    key[0, 3], value[0, 0, 5] = np.nan, np.nan
    if library.traces:
        key, value = draw(rng, (2, places, 4), (1, 2, places, 3))
    elif not library.lazy:
        assert is_patched(*map(library.put, (query, key, value)), attn_mask=mask)
    result = library.call(attention_state, query, key, value, attn_mask=mask)
    expected = attention_state(query, key, value, array)
    for computed, right in zip(result, expected, strict=True):
        np.testing.assert_allclose(library.get(computed), right, atol=1e-5)
    pullback, right_pullback = (vjp(query, key, value, x)[1] for x in (mask, array))
    cotangent = np.ones_like(expected.output)
    for name, gradient in right_pullback(cotangent).items():
        np.testing.assert_allclose(pullback(cotangent)[name], gradient, atol=1e-4)


@pytest.mark.parametrize("periodic", [False, (False, True)])
def test_the_work_is_at_most_1_3_times_the_allowed_pairs(
    monkeypatch: pytest.MonkeyPatch, periodic: Any
) -> None:
    """64 x 64 places with 49 neighbours each, as explained and as multiplied."""
    x = np.zeros((1, 4096, 8), np.float32)
    mask = masks.neighbourhood((64, 64), 3, periodic=periodic)
    multiplied: list[int] = []
    product = scores.matmul_grouped

    def counted(*arrays: Any) -> Any:
        computed = product(*arrays)
        multiplied.append(math.prod(computed.shape))
        return computed

    monkeypatch.setattr(scores, "matmul_grouped", counted)
    scaled_dot_product_attention(x, x, x, mask)
    assert 4096 * 49 <= sum(multiplied) <= 1.3 * 4096 * 49
    assert explain(x, x, x, mask).multiplications == sum(multiplied) * 16


def test_threads_share_the_patches(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setenv("SDPA_XP_NUM_THREADS", "3")
    arrays, mask = draw(rng, *[(2, 8, 1024, 64)] * 3), masks.neighbourhood((32, 32), 2)
    assert explain(*arrays, mask).threads == 3
    expected = scaled_dot_product_attention(*arrays, masks.to_array(mask, (1024, 1024)))
    np.testing.assert_allclose(scaled_dot_product_attention(*arrays, mask), expected, atol=1e-5)


@pytest.mark.parametrize(
    "rules",
    [
        {"bias": biases.alibi(np.ones(1))},
        {"softcap": 5.0},
        {"sinks": np.zeros(1)},
        {"scale": np.ones((1, 1, 1))},
        {"is_causal": True},
        {"reproducible": True},
        {"dropout_p": 0.5, "rng": np.random.default_rng(0)},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_calls_with_other_options_are_cut_into_ranges(rules: dict[str, Any], rng: np.random.Generator) -> None:
    """But for dropout, whose tiles `explain` does not draw, it says so; the result is that of the array."""
    mask = masks.neighbourhood((32, 32), 2)
    arrays = [np.asarray(x, np.float64) for x in draw(rng, *[(1, 1024, 8)] * 3)]
    assert is_patched(*arrays, attn_mask=mask)
    assert not is_patched(*arrays, attn_mask=mask, **rules) or "dropout_p" in rules
    results = []
    for equal in (mask, masks.to_array(mask, (1024, 1024))):
        rules |= {"rng": np.random.default_rng(0)} if "rng" in rules else {}
        results.append(scaled_dot_product_attention(*arrays, equal, **rules))
    np.testing.assert_allclose(*results, atol=1e-12)


@pytest.mark.needs("jax")
@pytest.mark.parametrize("side", [24, 48])
def test_a_jit_reads_lists_of_keys_in_place_of_a_loop(rng: np.random.Generator, side: int) -> None:
    """And the gradients are those of the array, which JAX derives from the copies of the keys."""
    jax: Any = importlib.import_module("jax")
    mask, places = masks.neighbourhood((side, side), 1, periodic=True), side * side
    arrays = [jax.numpy.asarray(x) for x in draw(rng, *[(1, 4, places, 4)] * 3)]
    array = jax.numpy.asarray(masks.to_array(mask, (places, places)))

    def total(rule: Any, *inputs: Any) -> Any:
        return jax.numpy.sum(scaled_dot_product_attention(*inputs, rule) ** 2)

    program = str(jax.make_jaxpr(lambda *inputs: total(mask, *inputs))(*arrays))
    assert "scan" not in program
    assert ("gather" in program) == (side == 48)  # the smaller image is one tile
    of_mask, of_array = (
        jax.jit(jax.grad(lambda *inputs, rule=rule: total(rule, *inputs), argnums=(0, 1, 2)))(*arrays)
        for rule in (mask, array)
    )
    for gradient, expected in zip(of_mask, of_array, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-4)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("left_out", [0, 2])
def test_tokens_in_front_of_the_places_are_computed_in_ranges(rng: np.random.Generator, left_out: int) -> None:
    """Also of a call that has as many tokens as there are places."""
    mask, tokens = masks.neighbourhood((9, 8), window=(3, 4), prefix_tokens=2), 74 - left_out
    arrays = draw(rng, *[(1, tokens, 8)] * 3)
    assert not is_patched(*arrays, attn_mask=mask)
    array = neighbours((9, 8), (3, 4), (1, 1), (False,) * 2, (False,) * 2, "shifted", 2)[:tokens, :tokens]
    expected = scaled_dot_product_attention(*arrays, array)
    np.testing.assert_allclose(scaled_dot_product_attention(*arrays, mask), expected, atol=1e-5)
