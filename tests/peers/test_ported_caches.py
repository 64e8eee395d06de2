"""Rows of docs/how-to/port.md on caches, packed calls and log-sum-exps, against what the peers document."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from calls import draw
from peers.flash_references import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flashinfer_append_paged_kv_cache,
    flashinfer_batch_prefill,
    flashinfer_merge_state,
)
from peers.judged import CLOSE

from sdpa_xp import (
    AttentionState,
    PagedKVCache,
    attention_state,
    biases,
    masks,
    merge_states,
    scaled_dot_product_attention,
    varlen_attention,
    varlen_attention_state,
)
from sdpa_xp.positional import RotaryTables

TABLE = [[4, 0, 7], [2, 5, -1], [1, 6, 3]]
CU_Q, LENGTHS = [0, 5, 5, 7], [9, 3, 6]
"""A prompt of 5, an idle sequence, and 2 tokens of a draft; and the tokens in the blocks."""
CU_K = [0, 9, 12, 18]
SLOPES = np.asarray([1.0, 0.5, 0.25, 0.125], np.float32)


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=CLOSE)


@pytest.fixture
def pools(rng: np.random.Generator) -> list[np.ndarray]:
    """(num_blocks, page_block_size, nheads_k, headdim)."""
    return draw(rng, (8, 4, 2, 8), (8, 4, 2, 8))


# The options of flash_attn_varlen_func and flash_attn_with_kvcache, and what a cache is told instead.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "not causal, the default": ({}, {"is_causal": False}),
    "causal": ({"causal": True}, {}),
    "window": ({"window_size": (2, 1)}, {"is_causal": False, "attn_mask": masks.sliding_window(2, 1)}),
    "causal window": ({"causal": True, "window_size": (2, 0)}, {"attn_mask": masks.sliding_window(2, 0)}),
    "alibi": ({"causal": True, "alibi_slopes": SLOPES}, {"bias": biases.alibi(SLOPES)}),
    "scale and softcap": (
        {"softmax_scale": 0.9, "softcap": 1.5},
        {"is_causal": False, "scale": 0.9, "softcap": 1.5},
    ),
}


@pytest.mark.parametrize(("flash_options", "options"), OPTIONS.values(), ids=OPTIONS)
def test_flash_attn_varlen_func_with_a_block_table(
    rng: np.random.Generator, pools: Any, flash_options: dict[str, Any], options: dict[str, Any]
) -> None:
    (query,) = draw(rng, (7, 4, 8))
    theirs = flash_attn_varlen_func(query, pools, CU_Q, CU_K, block_table=TABLE, **flash_options)
    cache = PagedKVCache(*pools, TABLE, LENGTHS, layout="...LHE")
    state = cache.attend_state(query, cu_seqlens_q=CU_Q, **options)
    close(state.output, theirs[0])
    close(state.lse, theirs[1])  # (heads, total_q)
    close(cache.attend(query, cu_seqlens_q=CU_Q, **options), theirs[0])


def test_the_log_sum_exp_of_flash_attn_varlen_func(rng: np.random.Generator) -> None:
    """return_attn_probs: softmax_lse is (heads, total_q)."""
    query, key, value = draw(rng, (7, 4, 8), (18, 2, 8), (18, 2, 8))
    whole = [np.zeros((3, 16, 2, 8), np.float32) for _ in "kv"]
    for pool, x in zip(whole, (key, value), strict=True):
        for n, (first, last) in enumerate(pairwise(CU_K)):
            pool[n, : last - first] = x[first:last]
    theirs = flash_attn_varlen_func(query, whole, CU_Q, CU_K, block_table=[[0], [1], [2]], causal=True)
    state = varlen_attention_state(query, key, value, CU_Q, CU_K, masks.causal("lower_right"))
    close(state.output, theirs[0])
    close(state.lse, theirs[1])


@pytest.mark.parametrize(("flash_options", "options"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("where", ["block_table", "rows", "cache_batch_idx", "cache_leftpad"])
def test_flash_attn_with_kvcache(
    rng: np.random.Generator, where: str, flash_options: dict[str, Any], options: dict[str, Any]
) -> None:
    """Without a block_table each row of the cache is one block, and cache_batch_idx chooses rows."""
    paged = where == "block_table"
    caches = draw(rng, *[(8, 4, 2, 8)] * 2) if paged else draw(rng, *[(5, 12, 2, 8)] * 2)
    query, *news = draw(rng, (3, 2, 4, 8), *[(3, 2, 2, 8)] * 2)
    told: dict[str, Any] = {"cache_seqlens": [7, 1, 6]}
    blocks, leftpad = [[0], [1], [2]], [3, 0, 5]
    if paged:
        told["block_table"] = blocks = TABLE
    if where == "cache_batch_idx":
        told["cache_batch_idx"] = [4, 0, 2]
        blocks = [[n] for n in told["cache_batch_idx"]]
    if where == "cache_leftpad":
        told["cache_leftpad"] = leftpad
        mask = ~masks.prefix(leftpad)
        options = options | {"attn_mask": options["attn_mask"] & mask if "attn_mask" in options else mask}
    theirs = flash_attn_with_kvcache(query, *(x.copy() for x in caches), *news, **told, **flash_options)
    cache = PagedKVCache(*caches, blocks, told["cache_seqlens"], layout="...LHE")
    state = cache.append(*news, in_place=True).attend_state(query, **options)
    close(state.output, theirs[0])
    close(state.lse, theirs[1])  # (batch, heads, seqlen)


def test_a_cache_is_causal_by_default_where_the_peer_is_not(rng: np.random.Generator, pools: Any) -> None:
    (query,) = draw(rng, (3, 2, 4, 8))
    theirs, _ = flash_attn_with_kvcache(query, *pools, cache_seqlens=LENGTHS, block_table=TABLE)
    cache = PagedKVCache(*pools, TABLE, LENGTHS, layout="...LHE")
    assert np.max(np.abs(cache.attend(query)[:, 0] - theirs[:, 0])) > 0.1
    close(cache.attend(query)[:, 1], theirs[:, 1])  # the last query attends to all
    close(cache.attend(query, is_causal=False), theirs)


def test_more_queries_than_keys(rng: np.random.Generator, pools: Any) -> None:
    """flash-attention returns 0 for queries before the first key."""
    (query,) = draw(rng, (3, 5, 4, 8))
    theirs, _ = flash_attn_with_kvcache(query, *pools, cache_seqlens=LENGTHS, block_table=TABLE, causal=True)
    cache = PagedKVCache(*pools, TABLE, LENGTHS, layout="...LHE")
    with pytest.raises(ValueError, match="sequence 1 of the cache"):
        cache.attend(query)
    ours = cache.attend(query, masks.causal(), is_causal=False)
    close(ours, theirs)
    assert not ours[1, :2].any()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", ["causal", "window", "not causal, the default"])
def test_rotary_of_flash_attn_with_kvcache(
    rng: np.random.Generator, pools: Any, name: str, interleaved: bool
) -> None:
    """A query is at its own place here. There it is at cache_seqlens + i, or at cache_seqlens with neither
    causal nor a window, which is to be said.
    """
    flash_options, options = OPTIONS[name]
    angles = rng.random((12, 3), np.float32) * 6
    tables = np.cos(angles), np.sin(angles)
    rotary = RotaryTables(*tables, interleaved=interleaved)
    query, *news = draw(rng, (3, 2, 4, 8), *[(3, 2, 2, 8)] * 2)
    seqlens = [7, 2, 4]
    told = {"cache_seqlens": seqlens, "block_table": TABLE, "rotary": tables}
    theirs, _ = flash_attn_with_kvcache(
        query, *pools, *news, **told, rotary_interleaved=interleaved, **flash_options
    )
    cache = PagedKVCache(*pools, TABLE, seqlens, layout="...LHE", rotary=rotary).append(*news)
    if flash_options:
        close(cache.attend(query, **options), theirs)
        return
    assert np.max(np.abs(cache.attend(query, **options) - theirs)) > 0.01
    close(cache.attend(query, positions=[[n] * 2 for n in seqlens], **options), theirs)


INDPTR, INDICES = [0, 3, 4, 6], [4, 0, 7, 2, 1, 6]
INFER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "not causal, the default": ({}, {"is_causal": False}),
    "causal": ({"causal": True}, {}),
    "window": ({"causal": True, "window_left": 2}, {"attn_mask": masks.sliding_window(2, None)}),
    "scale and softcap": (
        {"causal": True, "sm_scale": 0.9, "logits_soft_cap": 1.5},
        {"scale": 0.9, "softcap": 1.5},
    ),
}


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("infer_options", "options"), INFER.values(), ids=INFER)
def test_flashinfer_batch_prefill_over_a_paged_cache(
    rng: np.random.Generator, pools: Any, infer_options: dict[str, Any], options: dict[str, Any], kv_layout: str
) -> None:
    """append_paged_kv_cache, plan and run: the logarithm is to base 2 and (nnz, heads)."""
    query, *news = draw(rng, (7, 4, 8), (7, 2, 8), (7, 2, 8))
    last_page_len = [1, 3, 2]  # after appending: 9, 3 and 6 tokens
    paged = {"paged_kv_indptr": INDPTR, "paged_kv_indices": INDICES, "paged_kv_last_page_len": last_page_len}
    written = [x.copy() for x in pools]
    for new, pool in zip(news, written, strict=True):
        flashinfer_append_paged_kv_cache(new, pool, INDICES, INDPTR, CU_Q, LENGTHS)
    theirs = flashinfer_batch_prefill(query, written, qo_indptr=CU_Q, **paged, **infer_options)

    table = [INDICES[first:last] for first, last in pairwise(INDPTR)]
    lengths = [(len(row) - 1) * 4 + n for row, n in zip(table, last_page_len, strict=True)]
    assert lengths == LENGTHS
    before = [n - new for n, new in zip(lengths, np.diff(CU_Q).tolist(), strict=True)]
    layout: Any = {"NHD": "...LHE", "HND": "...HLE"}[kv_layout]
    if kv_layout == "HND":  # pools and what is appended have it in FlashInfer; queries and outputs are NHD
        pools = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in pools]
        query, *news = (x.swapaxes(0, 1) for x in (query, *news))
    cache = PagedKVCache(*pools, table, before, layout=layout).append(*news, cu_seqlens_k=CU_Q)
    state = cache.attend_state(query, cu_seqlens_q=CU_Q, lse_base=2, **options)
    output = state.output if kv_layout == "NHD" else state.output.swapaxes(0, 1)
    close(output, theirs[0])
    np.testing.assert_allclose(state.lse.T, theirs[1], rtol=0, atol=2 * CLOSE)


def test_the_custom_mask_of_flashinfer(rng: np.random.Generator, pools: Any) -> None:
    """One boolean for each query and key of a request, all after one another; True may attend."""
    (query,) = draw(rng, (7, 4, 8))
    new = np.diff(CU_Q).tolist()
    custom_mask = [rng.random((n, length)) < 0.7 for n, length in zip(new, LENGTHS, strict=True)]
    flat = np.concatenate([part.reshape(-1) for part in custom_mask])
    paged = {"paged_kv_indptr": INDPTR, "paged_kv_indices": INDICES, "paged_kv_last_page_len": [1, 3, 2]}
    theirs = flashinfer_batch_prefill(query, pools, qo_indptr=CU_Q, custom_mask=flat, **paged)

    mask = np.zeros((3, max(LENGTHS), max(LENGTHS)), bool)
    for allowed, part in zip(mask, custom_mask, strict=True):
        queries, keys = part.shape
        allowed[keys - queries : keys, :keys] = part  # the queries are the last tokens
    cache = PagedKVCache(*pools, [[4, 0, 7], [2], [1, 6]], LENGTHS, layout="...LHE")
    function = masks.from_function(lambda b, h, i, j: mask[b, i, j])
    close(cache.attend(query, function, cu_seqlens_q=CU_Q, is_causal=False), theirs[0])


def test_the_merged_states_of_flashinfer(rng: np.random.Generator) -> None:
    """Held as there, (length, heads, width) and (length, heads), and merged here."""
    query, key, value = draw(rng, (7, 4, 8), (12, 2, 8), (12, 2, 8))
    states = [
        attention_state(query, key[part], value[part], layout="...LHE", lse_base=2)
        for part in (slice(0, 5), slice(5, 12))
    ]
    peer_states = [(state.output, state.lse.T) for state in states]
    v, s = flashinfer_merge_state(*peer_states[0], *peer_states[1])
    merged = merge_states([AttentionState(v, s.T) for v, s in peer_states], lse_base=2, layout="...LHE")
    close(merged.output, v)
    close(merged.lse.T, s)


def test_flashinfer_batch_decode_over_a_paged_cache(rng: np.random.Generator, pools: Any) -> None:
    """One query a request, (batch, heads, width): packed queries of length 1."""
    (query,) = draw(rng, (3, 4, 8))
    paged = {"paged_kv_indptr": INDPTR, "paged_kv_indices": INDICES, "paged_kv_last_page_len": [1, 3, 2]}
    theirs = flashinfer_batch_prefill(query, pools, qo_indptr=[0, 1, 2, 3], **paged)
    cache = PagedKVCache(*pools, [[4, 0, 7], [2], [1, 6]], LENGTHS, layout="...LHE")
    close(cache.attend(query, cu_seqlens_q=range(4)), theirs[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:is_fx_tracing")
@pytest.mark.needs("torch")
def test_jagged_tensors_of_torch(rng: np.random.Generator) -> None:
    """Their values and offsets are packed sequences; as they are, they are refused with this hint."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as theirs

    queries, keys = [3, 5, 2], [4, 5, 1]
    query, key, value = map(torch.asarray, draw(rng, (10, 2, 8), (10, 2, 8), (10, 2, 8)))
    offsets, key_offsets = (torch.tensor([0, *np.cumsum(lengths)]) for lengths in (queries, keys))
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x, bounds)
        for x, bounds in ((query, offsets), (key, key_offsets), (value, key_offsets))
    )
    before = theirs(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    after = varlen_attention(q.values(), k.values(), v.values(), q.offsets(), k.offsets())
    close(after, before.values())
    with pytest.raises(
        TypeError, match=r"`\.values\(\)` and `\.offsets\(\)` of a jagged tensor to `varlen_att"
    ):
        scaled_dot_product_attention(q, k, v)


@pytest.mark.needs("jax")
def test_the_gradient_of_the_residual_of_jax(rng: np.random.Generator) -> None:
    """jax.nn stops it; a state has the true one, scale * weights @ key, until it is stopped."""
    import jax
    import jax.numpy as jnp

    query, key, value = map(jnp.asarray, draw(rng, (2, 5, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8)))

    @jax.jit
    @jax.grad
    def theirs(query: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, return_residual=True)[1].sum()

    @jax.jit
    @jax.grad
    def ours(query: Any) -> Any:
        return attention_state(query, key, value, layout="...LHE").lse.sum()

    @jax.jit
    @jax.grad
    def stopped(query: Any) -> Any:
        return jax.lax.stop_gradient(attention_state(query, key, value, layout="...LHE").lse).sum()

    assert not theirs(query).any()
    assert not stopped(query).any()
    scores = np.einsum("blhe,bshe->bhls", query, key, dtype=np.float64) / math.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhls,bshe->blhe", weights, key) / math.sqrt(8)
    np.testing.assert_allclose(ours(query), expected, rtol=0, atol=CLOSE)
