"""Masks of places, trees and blocks: at every border, and how much of a grid their tiles cover."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import draw
from libraries import Library
from places import ancestors, drawn_neighbourhoods, neighbours

from sdpa_xp import (
    KVCache,
    attention_weights,
    explain,
    masks,
    scaled_dot_product_attention,
    scaled_dot_product_attention_vjp,
    varlen_attention,
)

F = np.float32


def dense(mask: masks.Mask, queries: int, keys: int) -> np.ndarray:
    return np.asarray(masks.to_array(mask, (queries, keys)))


@pytest.mark.parametrize("case", drawn_neighbourhoods(80), ids=str)
@pytest.mark.parametrize("prefix_tokens", [0, 3])
def test_neighbourhood_at_every_border(case: dict[str, Any], prefix_tokens: int) -> None:
    mask = masks.neighbourhood(**case, prefix_tokens=prefix_tokens)
    expected = neighbours(**case, prefix_tokens=prefix_tokens)
    np.testing.assert_array_equal(dense(mask, *expected.shape), expected)


def test_a_radius_is_half_of_a_window() -> None:
    by_radius = masks.neighbourhood((9, 11), (1, 2), dilation=2)
    assert by_radius == masks.neighbourhood((9, 11), window=(3, 5), dilation=2)
    assert by_radius != masks.neighbourhood((9, 11), window=(3, 4), dilation=2)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("mask", "places"),
    [
        (masks.neighbourhood((9, 11), (1, 2)), 99),
        (masks.neighbourhood((9, 11), 1, dilation=3, borders="cut"), 99),
        (masks.neighbourhood((9, 11), 1, periodic=(True, False)), 99),
        (masks.neighbourhood((4, 4, 5), 1, dilation=(1, 1, 1)), 80),
        (masks.neighbourhood((9, 11), window=(4, 3), causal=(True, False)), 99),
        (masks.neighbourhood((9, 11), window=(4, 2), periodic=(True, False), borders="cut"), 99),
        (masks.neighbourhood((9, 11), window=(4, 2), dilation=2, prefix_tokens=3), 102),
        (masks.neighbourhood((9, 11), window=(4, 1), causal=True, prefix_tokens=1), 100),
        (masks.blocks(np.random.default_rng(0).random((7, 9)) < 0.3, (13, 11)), 91),
        (masks.tree([-1, 0, 0, 1, 1, 4, -1, 6, 2, 3]), 10),
    ],
    ids=str,
)
def test_tiles_leave_no_pair_out(rng: np.random.Generator, mask: masks.Mask, places: int) -> None:
    """Output and gradients, whose tiles are asked for keys and for queries, against those of the array."""
    query, key, value = draw(rng, *[(2, places, 8)] * 3)
    array = dense(mask, places, places)
    output, pullback = scaled_dot_product_attention_vjp(query, key, value, mask)
    expected, expected_pullback = scaled_dot_product_attention_vjp(query, key, value, array)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    gradients, expected_gradients = pullback(value), expected_pullback(value)
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(gradients[name], expected_gradients[name], atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "places", "most"),
    [
        # 512 queries are 8 rows of the image and need 14 rows of keys: 4 of 16 tiles of 256 keys.
        (masks.neighbourhood((64, 64), 3), 4096, 4 / 16),
        (masks.neighbourhood((64, 64), 3, periodic=(False, True)), 4096, 4 / 16),
        # And one of the first token, which itself attends to all keys.
        (masks.neighbourhood((64, 64), 3, prefix_tokens=1), 4097, 7 / 16),
        (masks.blocks(np.eye(8, dtype=bool)), 4096, 2 / 16),
    ],
    ids=str,
)
def test_tiles_without_pairs_are_skipped(mask: masks.Mask, places: int, most: float) -> None:
    x = np.zeros((1, places, 8), F)
    plan = explain(x, x, x, mask)
    assert 0 < plan.tiles <= most * plan.total_tiles


@pytest.mark.parametrize("context", [0, 1, 300])
def test_a_tree_stands_behind_what_a_cache_holds(rng: np.random.Generator, context: int) -> None:
    parents = [-1, -1, 0, 0, 1, 2, 4]
    keys = context + len(parents)
    query, key, value = draw(rng, (3, len(parents), 8), (3, keys, 8), (3, keys, 8))
    drafts = KVCache(key[:, :context], value[:, :context]).append(key[:, context:], value[:, context:])
    expected = scaled_dot_product_attention(query, key, value, ancestors(parents, context, keys))
    for result in (
        drafts.attend(query, attn_mask=masks.tree(parents)),
        scaled_dot_product_attention(query, key, value, masks.tree(parents, offset=context)),
        scaled_dot_product_attention(query, key, value, masks.tree(np.asarray(parents), offset="lower_right")),
    ):
        np.testing.assert_allclose(result, expected, atol=1e-6)


def test_drafts_that_share_positions_are_told_apart_by_their_places(rng: np.random.Generator) -> None:
    """Also behind tokens that stand far apart."""
    parents = [-1, -1, 0, 1]
    query, key, value = draw(rng, (2, 4, 8), (2, 24, 8), (2, 24, 8))
    context = KVCache(key[:, :20], value[:, :20], positions=[*range(10), *range(90, 100)])
    drafts = context.append(key[:, 20:], value[:, 20:], positions=[100, 100, 101, 101])
    expected = scaled_dot_product_attention(query, key, value, ancestors(parents, 20, 24))
    np.testing.assert_allclose(drafts.attend(query, attn_mask=masks.tree(parents)), expected, atol=1e-6)


@pytest.mark.parametrize("mask", [masks.neighbourhood((4, 4), 1), masks.blocks(np.eye(4, dtype=bool), 4)])
def test_places_are_those_in_a_cache_whatever_the_positions(rng: np.random.Generator, mask: masks.Mask) -> None:
    query, key, value = draw(rng, (1, 3, 4), (1, 12, 4), (1, 12, 4))
    caches = KVCache(key, value), KVCache(key, value, first_position=100)
    results = [cache.attend(query, attn_mask=mask, is_causal=False) for cache in caches]
    np.testing.assert_array_equal(*results)
    short = KVCache(key[:, :2], value[:, :2])
    with pytest.raises(ValueError, match="at most as many"):
        short.attend(query, attn_mask=mask, is_causal=False)


def test_a_table_for_each_head(rng: np.random.Generator) -> None:
    table = rng.random((4, 3, 5)) < 0.5
    query, key, value = draw(rng, (2, 4, 9, 8), (2, 2, 10, 8), (2, 2, 10, 8))
    expected = np.repeat(np.repeat(table, 3, axis=1), 2, axis=2)
    result = scaled_dot_product_attention(query, key, value, masks.blocks(table))
    np.testing.assert_allclose(result, scaled_dot_product_attention(query, key, value, expected), atol=1e-6)


FORKS = [[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, -1, 1, 0]]
ENTRIES = np.random.default_rng(3).random((3, 1, 2, 4)) < 0.5


@pytest.mark.parametrize("lengths", [[9, 9, 9], [9, 7, 9], [4, 6, 8]], ids=str)
def test_sequences_have_trees_and_tables_of_their_own(
    library: Library, rng: np.random.Generator, lengths: list[int]
) -> None:
    """Those of equal lengths are computed together, whichever entries of the batch they are."""
    query, key, value = draw(rng, (2, 12, 8), (2, sum(lengths), 8), (2, sum(lengths), 8))
    ends = [0, *np.cumsum(lengths).tolist()]
    packed: dict[str, Any] = {"cu_seqlens_q": [0, 4, 8, 12], "cu_seqlens_k": ends, "layout": "...HLE"}
    for mask, of_entry in (
        (masks.tree(FORKS, offset="lower_right"), lambda n, s: ancestors(FORKS[n], s - 4, s)),
        (
            masks.blocks(ENTRIES, (2, 3)),
            lambda n, s: ENTRIES[n, 0][np.ix_(np.arange(4) // 2, np.arange(s) // 3)],
        ),
    ):
        output = library.call(varlen_attention, query, key, value, attn_mask=mask, **packed)
        for n, keys in enumerate(lengths):
            of_queries, of_keys = slice(4 * n, 4 * n + 4), slice(ends[n], ends[n + 1])
            arrays = query[:, of_queries], key[:, of_keys], value[:, of_keys]
            expected = scaled_dot_product_attention(*arrays, of_entry(n, keys))
            np.testing.assert_allclose(library.get(output)[:, of_queries], expected, atol=1e-5)


def test_a_cache_has_trees_and_tables_for_each_entry(rng: np.random.Generator) -> None:
    """Also one whose entries are at other positions: places are counted in the cache."""
    query, key, value = draw(rng, (3, 2, 4, 8), (3, 2, 12, 8), (3, 2, 12, 8))
    table = rng.random((3, 2, 3, 4)) < 0.5
    of_trees = np.stack([ancestors(tree, 8, 12) for tree in FORKS])[:, None]
    of_tables = table.repeat(4, axis=-2).repeat(3, axis=-1)[..., 8:, :]
    for positions in ({}, {"first_position": [0, 5, 9]}):
        cache = KVCache(key[..., :8, :], value[..., :8, :], **positions)
        cache = cache.append(key[..., 8:, :], value[..., 8:, :])
        for mask, array in ((masks.tree(FORKS), of_trees), (masks.blocks(table, (4, 3)), of_tables)):
            result = cache.attend(query, attn_mask=mask, is_causal=False)
            expected = scaled_dot_product_attention(query, key, value, array)
            np.testing.assert_allclose(result, expected, atol=1e-5)


def test_axes_of_a_batch_may_share_trees_and_tables(rng: np.random.Generator) -> None:
    """Output, gradients and weights."""
    query, key, value = draw(rng, *[(2, 3, 4, 8, 8)] * 3)
    table = rng.random((2, 1, 1, 2, 4)) < 0.5
    parents = [[[-1, 0, 1, 1, -1, 4, 2, 0]], [[-1, 0, 1, 2, 3, 4, 5, 6]]]
    of_trees = np.stack([ancestors(tree, 0, 8) for (tree,) in parents])[:, None, None]
    for mask, array in (
        (masks.tree(parents), of_trees),
        (masks.tree(parents[0]), of_trees[0]),
        (masks.blocks(table), table.repeat(4, axis=-2).repeat(2, axis=-1)),
        (masks.blocks(np.concatenate([table[0]] * 3)), table[0].repeat(4, axis=-2).repeat(2, axis=-1)),
    ):
        (output, pullback), (expected, of_array) = (
            scaled_dot_product_attention_vjp(query, key, value, x) for x in (mask, array)
        )
        np.testing.assert_allclose(output, expected, atol=1e-5)
        gradients, right = pullback(value), of_array(value)
        for name in ("query", "key", "value"):
            np.testing.assert_allclose(gradients[name], right[name], atol=1e-5)
        weights = (attention_weights(query, key, attn_mask=x) for x in (mask, array))
        np.testing.assert_allclose(*weights, atol=1e-6)


def test_tiles_that_no_entry_attends_to_are_skipped() -> None:
    x, table = np.zeros((2, 1, 4096, 8), F), np.zeros((2, 1, 8, 8), bool)
    for entry in range(2):
        table[entry, 0, entry, entry + 3] = True
    plan = explain(x, x, x, masks.blocks(table))
    assert 0 < plan.tiles <= 2 * plan.total_tiles / 64
