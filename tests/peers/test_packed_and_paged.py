"""Packed sequences and paged caches as flash-attention and xformers state them, in plain float64 loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from calls import draw
from numpy.typing import NDArray
from peers.flash_references import flash_attention
from peers.judged import CLOSE

from sdpa_xp import biases, masks, scaled_dot_product_attention, varlen_attention

Floats = NDArray[np.float64]
CU_Q, CU_K = [0, 2, 7, 7, 10, 13], [0, 5, 7, 9, 9, 12]
"""Sequences of (2, 5), (5, 2), (0, 2), (3, 0) and (3, 3) queries and keys."""


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=CLOSE)


def packed(function: Any, query: Any, key: Any, value: Any, **rules: Any) -> Floats:
    """`function` of each sequence, one after the other."""
    bounds = zip(itertools.pairwise(CU_Q), itertools.pairwise(CU_K), strict=True)
    return np.concatenate([function(query[a:b], key[c:d], value[c:d], **rules) for (a, b), (c, d) in bounds])


SLOPES = np.asarray([1.0, 0.5, 0.25, 0.125], np.float32)
LOWER_RIGHT = masks.causal("lower_right")

# The options of flash_attn_varlen_func, and the same options here.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"attn_mask": LOWER_RIGHT}),
    "window": (
        {"window_size": (2, 1)},
        {"attn_mask": masks.sliding_window(2, 1, offset="lower_right")},
    ),
    "open window": (
        {"window_size": (1, -1)},
        {"attn_mask": masks.sliding_window(1, None, offset="lower_right")},
    ),
    "causal window": (
        {"causal": True, "window_size": (1, 0)},
        {"attn_mask": masks.sliding_window(1, 0, offset="lower_right")},
    ),
    "scale and softcap": ({"softmax_scale": 0.9, "softcap": 1.5}, {"scale": 0.9, "softcap": 1.5}),
    "alibi": ({"alibi_slopes": SLOPES}, {"bias": biases.alibi(SLOPES, offset="lower_right")}),
}


@pytest.mark.parametrize(("flash_options", "options"), CALLS.values(), ids=CALLS)
def test_flash_attn_varlen_func(
    rng: np.random.Generator, flash_options: dict[str, Any], options: dict[str, Any]
) -> None:
    query, key, value = draw(rng, (13, 4, 8), (12, 2, 8), (12, 2, 8))
    ours = varlen_attention(query, key, value, CU_Q, CU_K, **options)
    close(ours, packed(flash_attention, query, key, value, **flash_options))
    assert not ours[7:10].any()  # the sequence without keys


def test_alibi_slopes_of_each_sequence(rng: np.random.Generator) -> None:
    """(batch_size, nheads) in flash-attention; here what has an entry for each sequence is a batch likewise."""
    query, key, value = draw(rng, (13, 4, 8), (12, 2, 8), (12, 2, 8))
    slopes = np.abs(rng.standard_normal((5, 4))).astype(np.float32)
    bounds = zip(itertools.pairwise(CU_Q), itertools.pairwise(CU_K), slopes, strict=True)
    theirs = [
        flash_attention(query[a:b], key[c:d], value[c:d], alibi_slopes=slopes_of_one)
        for (a, b), (c, d), slopes_of_one in bounds
    ]
    bias = biases.alibi(slopes, offset="lower_right")
    close(varlen_attention(query, key, value, CU_Q, CU_K, bias=bias), np.concatenate(theirs))


@pytest.mark.parametrize(("flash_options", "options"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("queries", "keys"), [(3, 6), (6, 3)])
def test_flash_attn_func(
    rng: np.random.Generator, flash_options: dict[str, Any], options: dict[str, Any], queries: int, keys: int
) -> None:
    query, key, value = draw(rng, (2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8))
    theirs = [flash_attention(*arrays, **flash_options) for arrays in zip(query, key, value, strict=True)]
    close(scaled_dot_product_attention(query, key, value, **options, layout="...LHE"), np.stack(theirs))


def test_causal_of_packed_sequences_differs(rng: np.random.Generator) -> None:
    """`is_causal` counts each sequence from its first query and key, flash-attention from the last."""
    query, key, value = draw(rng, (13, 4, 8), (12, 2, 8), (12, 2, 8))
    ours = varlen_attention(query, key, value, CU_Q, CU_K, is_causal=True)
    theirs = packed(flash_attention, query, key, value, causal=True)
    assert np.max(np.abs(ours[:7] - theirs[:7])) > 0.1
    close(ours[10:], theirs[10:])  # as many queries as keys

    def upper_left(query: Any, key: Any, value: Any) -> Floats:
        mask = np.tril(np.ones((len(query), len(key)), bool))
        return scaled_dot_product_attention(query, key, value, mask, layout="...LHE")

    close(ours, packed(upper_left, query, key, value))


def xformers(
    query: Any, key: Any, value: Any, q_seqlen: list[int], kv_seqlen: list[int], causal: str
) -> Floats:
    """memory_efficient_attention, (M, H, K), with a BlockDiagonalMask.from_seqlens that is materialized.

    Blocks of 0, all else -inf; a causal block is -inf after the diagonal, which BlockDiagonalCausalMask
    starts at the block's first query and key, BlockDiagonalCausalFromBottomRightMask ends at its last.
    """
    bias = np.full((sum(q_seqlen), sum(kv_seqlen)), -np.inf)
    i, j = 0, 0
    for queries, keys in zip(q_seqlen, kv_seqlen, strict=True):
        block = np.zeros((queries, keys))
        if causal:
            shift = keys - queries if causal == "from_bottom_right" else 0
            block = np.triu(np.full((queries, keys), -np.inf), 1 + shift)
        bias[i : i + queries, j : j + keys] = block
        i, j = i + queries, j + keys
    scores = np.einsum("mhk,nhk->hmn", query.astype(np.float64), key) / math.sqrt(query.shape[-1]) + bias
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hmn,nhk->mhk", exponentials / exponentials.sum(axis=-1, keepdims=True), value)


@pytest.mark.parametrize(
    ("causal", "mask"), [("", None), ("from_top_left", masks.causal()), ("from_bottom_right", LOWER_RIGHT)]
)
def test_block_diagonal_mask_of_xformers(rng: np.random.Generator, causal: str, mask: Any) -> None:
    """As packed sequences; and as one row of documents, where offsets are those of the row."""
    query, key, value = draw(rng, (9, 2, 8), (13, 2, 8), (13, 2, 8))
    q_seqlen, kv_seqlen = [2, 3, 4], [4, 3, 6]
    theirs = xformers(query, key, value, q_seqlen, kv_seqlen, causal)
    close(varlen_attention(query, key, value, [0, 2, 5, 9], [0, 4, 7, 13], mask), theirs)
    documents = masks.document(np.repeat([0, 1, 2], q_seqlen), np.repeat([0, 1, 2], kv_seqlen))
    if not causal:
        close(scaled_dot_product_attention(query, key, value, documents, layout="...LHE"), theirs)
    square = xformers(key, key, value, kv_seqlen, kv_seqlen, "from_top_left")
    documents = masks.causal() & masks.document(np.repeat([0, 1, 2], kv_seqlen))
    close(scaled_dot_product_attention(key, key, value, documents, layout="...LHE"), square)
