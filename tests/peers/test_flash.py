"""Packed sequences, paged caches and log-sum-exps as flash-attention, FlashInfer and others have them.

The rows of docs/how-to/port.md, against what the peers document, in plain float64 loops.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from calls import draw
from peers.flash_references import (
    flash_attention,
    flash_attention_state,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flashinfer_append_paged_kv_cache,
    flashinfer_batch_prefill,
    flashinfer_merge_state,
    packed,
    xformers,
)
from peers.judged import CLOSE

import sdpa_xp
from sdpa_xp import PagedKVCache, attention_state, biases, masks, scaled_dot_product_attention, varlen_attention
from sdpa_xp.positional import RotaryTables

TABLE = [[4, 0, 7], [2, 5, -1], [1, 6, 3]]
CU_Q, LENGTHS = [0, 5, 5, 7], [9, 3, 6]
"""A prompt of 5, an idle sequence, and 2 tokens of a draft; and the tokens in the blocks."""
CU_K = [0, 9, 12, 18]
RAGGED_Q, RAGGED_K = [0, 2, 7, 7, 10, 13], [0, 5, 7, 9, 9, 12]
"""Sequences of (2, 5), (5, 2), (0, 2), (3, 0) and (3, 3) queries and keys."""
SLOPES = np.asarray([1.0, 0.5, 0.25, 0.125], np.float32)
LOWER_RIGHT = masks.causal("lower_right")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "open window": {"window_size": (1, -1)},
    "causal window": {"causal": True, "window_size": (1, 0)},
    "scale and softcap": {"softmax_scale": 0.9, "softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "causal alibi": {"causal": True, "alibi_slopes": SLOPES},
}
"""The options of flash-attention's functions."""


def stated(options: dict[str, Any], *, in_cache: bool = False) -> dict[str, Any]:
    """Return the same options here. A cache knows where its queries stand, and is causal if it is not told."""
    offset: dict[str, Any] = {} if in_cache else {"offset": "lower_right"}
    ours: dict[str, Any] = {"is_causal": options.get("causal", False)} if in_cache else {}
    limits = [LOWER_RIGHT] if options.get("causal") and not in_cache else []
    if "window_size" in options:
        limits.append(masks.sliding_window(*(None if n < 0 else n for n in options["window_size"]), **offset))
    if limits:
        ours["attn_mask"] = limits[0] if len(limits) == 1 else limits[0] & limits[1]
    if "alibi_slopes" in options:
        ours["bias"] = biases.alibi(options["alibi_slopes"], **offset)
    names = {"softmax_scale": "scale", "softcap": "softcap"}
    return ours | {name: options[theirs] for theirs, name in names.items() if theirs in options}


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=CLOSE)


@pytest.fixture
def pools(rng: np.random.Generator) -> list[np.ndarray]:
    """(num_blocks, page_block_size, nheads_k, headdim)."""
    return draw(rng, (8, 4, 2, 8), (8, 4, 2, 8))


@pytest.fixture
def ragged(rng: np.random.Generator) -> list[np.ndarray]:
    return draw(rng, (13, 4, 8), (12, 2, 8), (12, 2, 8))


@pytest.mark.parametrize("name", OPTIONS)
def test_flash_attn_varlen_func(ragged: Any, name: str) -> None:
    """softmax_lse is (heads, total_q)."""
    output, lse = packed(flash_attention_state, *ragged, RAGGED_Q, RAGGED_K, **OPTIONS[name])
    ours = varlen_attention(*ragged, RAGGED_Q, RAGGED_K, **stated(OPTIONS[name]))
    state = sdpa_xp.varlen_attention_state(*ragged, RAGGED_Q, RAGGED_K, **stated(OPTIONS[name]))
    close(ours, output)
    close(state.output, output)
    close(state.lse, lse)
    assert not ours[7:10].any()  # the sequence without keys


def test_alibi_slopes_of_each_sequence(rng: np.random.Generator, ragged: Any) -> None:
    """(batch_size, nheads) in flash-attention; here what has an entry for each sequence is a batch likewise."""
    slopes = np.abs(rng.standard_normal((5, 4))).astype(np.float32)
    output, _ = packed(flash_attention_state, *ragged, RAGGED_Q, RAGGED_K, by_sequence={"alibi_slopes": slopes})
    close(varlen_attention(*ragged, RAGGED_Q, RAGGED_K, **stated({"alibi_slopes": slopes})), output)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("queries", "keys"), [(3, 6), (6, 3)])
def test_flash_attn_func(rng: np.random.Generator, name: str, queries: int, keys: int) -> None:
    query, key, value = draw(rng, (2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8))
    theirs = [flash_attention(*arrays, **OPTIONS[name]) for arrays in zip(query, key, value, strict=True)]
    ours = scaled_dot_product_attention(query, key, value, **stated(OPTIONS[name]), layout="...LHE")
    close(ours, np.stack(theirs))


def test_causal_of_packed_sequences_differs(ragged: Any) -> None:
    """`is_causal` counts each sequence from its first query and key, flash-attention from the last."""
    ours = varlen_attention(*ragged, RAGGED_Q, RAGGED_K, is_causal=True)
    theirs, _ = packed(flash_attention_state, *ragged, RAGGED_Q, RAGGED_K, causal=True)
    assert np.max(np.abs(ours[:7] - theirs[:7])) > 0.1
    close(ours[10:], theirs[10:])  # as many queries as keys

    def upper_left(query: Any, key: Any, value: Any) -> Any:
        mask = np.tril(np.ones((len(query), len(key)), bool))
        return attention_state(query, key, value, mask, layout="...LHE")

    close(ours, packed(upper_left, *ragged, RAGGED_Q, RAGGED_K)[0])


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


@pytest.mark.parametrize("name", OPTIONS)
def test_flash_attn_varlen_func_with_a_block_table(rng: np.random.Generator, pools: Any, name: str) -> None:
    (query,) = draw(rng, (7, 4, 8))
    output, lse = flash_attn_varlen_func(query, pools, CU_Q, CU_K, block_table=TABLE, **OPTIONS[name])
    cache, ours = PagedKVCache(*pools, TABLE, LENGTHS, layout="...LHE"), stated(OPTIONS[name], in_cache=True)
    state = cache.attend_state(query, cu_seqlens_q=CU_Q, **ours)
    close(state.output, output)
    close(state.lse, lse)
    close(cache.attend(query, cu_seqlens_q=CU_Q, **ours), output)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("where", ["block_table", "rows", "cache_batch_idx", "cache_leftpad"])
def test_flash_attn_with_kvcache(rng: np.random.Generator, where: str, name: str) -> None:
    """Without a block_table each row of the cache is one block, and cache_batch_idx chooses rows.

    A cache is causal if it is not told, and softmax_lse is (batch, heads, seqlen).
    """
    caches = draw(rng, *[(8, 4, 2, 8) if where == "block_table" else (5, 12, 2, 8)] * 2)
    query, *news = draw(rng, (3, 2, 4, 8), *[(3, 2, 2, 8)] * 2)
    leftpad, ours = [3, 0, 5], stated(OPTIONS[name], in_cache=True)
    told = {"block_table": TABLE, "rows": None, "cache_batch_idx": [4, 0, 2], "cache_leftpad": leftpad}[where]
    blocks = {"block_table": TABLE, "cache_batch_idx": [[4], [0], [2]]}.get(where, [[0], [1], [2]])
    if where == "cache_leftpad":
        mask = ~masks.prefix(leftpad)
        ours["attn_mask"] = ours["attn_mask"] & mask if "attn_mask" in ours else mask
    if ours["is_causal"]:
        del ours["is_causal"]
    options = OPTIONS[name] | ({} if told is None else {where: told})
    copies = [x.copy() for x in caches]
    output, lse = flash_attn_with_kvcache(query, *copies, *news, cache_seqlens=[7, 1, 6], **options)
    cache = PagedKVCache(*caches, blocks, [7, 1, 6], layout="...LHE").append(*news, in_place=True)
    state = cache.attend_state(query, **ours)
    close(state.output, output)
    close(state.lse, lse)


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
@pytest.mark.parametrize("name", ["causal", "window", "plain"])
def test_rotary_of_a_kvcache(rng: np.random.Generator, pools: Any, name: str, interleaved: bool) -> None:
    """A query is at its own place here. There it is at cache_seqlens + i, or at cache_seqlens with neither
    causal nor a window, which is to be said.
    """
    options, seqlens = OPTIONS[name], [7, 2, 4]
    angles = rng.random((12, 3), np.float32) * 6
    tables = np.cos(angles), np.sin(angles)
    query, *news = draw(rng, (3, 2, 4, 8), *[(3, 2, 2, 8)] * 2)
    told = {"cache_seqlens": seqlens, "block_table": TABLE, "rotary": tables}
    theirs, _ = flash_attn_with_kvcache(query, *pools, *news, **told, rotary_interleaved=interleaved, **options)
    rotary, ours = RotaryTables(*tables, interleaved=interleaved), stated(options, in_cache=True)
    cache = PagedKVCache(*pools, TABLE, seqlens, layout="...LHE", rotary=rotary).append(*news)
    if not options:
        assert np.max(np.abs(cache.attend(query, **ours) - theirs)) > 0.01
        ours["positions"] = [[n] * 2 for n in seqlens]
    close(cache.attend(query, **ours), theirs)


INDPTR, INDICES, LAST_PAGE_LEN = [0, 3, 4, 6], [4, 0, 7, 2, 1, 6], [1, 3, 2]
PAGED = {"paged_kv_indptr": INDPTR, "paged_kv_indices": INDICES, "paged_kv_last_page_len": LAST_PAGE_LEN}
BLOCKS = [INDICES[first:last] for first, last in pairwise(INDPTR)]
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
    written = [x.copy() for x in pools]
    for new, pool in zip(news, written, strict=True):
        flashinfer_append_paged_kv_cache(new, pool, INDICES, INDPTR, CU_Q, LENGTHS)
    theirs = flashinfer_batch_prefill(query, written, qo_indptr=CU_Q, **PAGED, **infer_options)

    lengths = [(len(row) - 1) * 4 + n for row, n in zip(BLOCKS, LAST_PAGE_LEN, strict=True)]
    assert lengths == LENGTHS
    before = np.asarray(lengths) - np.diff(CU_Q)
    layout: Any = {"NHD": "...LHE", "HND": "...HLE"}[kv_layout]
    if kv_layout == "HND":  # pools and what is appended have it in FlashInfer; queries and outputs are NHD
        pools = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in pools]
        query, *news = (x.swapaxes(0, 1) for x in (query, *news))
    cache = PagedKVCache(*pools, BLOCKS, before, layout=layout).append(*news, cu_seqlens_k=CU_Q)
    state = cache.attend_state(query, cu_seqlens_q=CU_Q, lse_base=2, **options)
    close(state.output if kv_layout == "NHD" else state.output.swapaxes(0, 1), theirs[0])
    np.testing.assert_allclose(state.lse.T, theirs[1], rtol=0, atol=2 * CLOSE)


def test_the_custom_mask_of_flashinfer(rng: np.random.Generator, pools: Any) -> None:
    """One boolean for each query and key of a request, all after one another; True may attend."""
    (query,) = draw(rng, (7, 4, 8))
    new = np.diff(CU_Q).tolist()
    custom_mask = [rng.random((n, length)) < 0.7 for n, length in zip(new, LENGTHS, strict=True)]
    flat = np.concatenate([part.reshape(-1) for part in custom_mask])
    theirs = flashinfer_batch_prefill(query, pools, qo_indptr=CU_Q, custom_mask=flat, **PAGED)

    mask = np.zeros((3, max(LENGTHS), max(LENGTHS)), bool)
    for allowed, part in zip(mask, custom_mask, strict=True):
        queries, keys = part.shape
        allowed[keys - queries : keys, :keys] = part  # the queries are the last tokens
    cache = PagedKVCache(*pools, BLOCKS, LENGTHS, layout="...LHE")
    function = masks.from_function(lambda b, h, i, j: mask[b, i, j])
    close(cache.attend(query, function, cu_seqlens_q=CU_Q, is_causal=False), theirs[0])


def test_flashinfer_batch_decode_over_a_paged_cache(rng: np.random.Generator, pools: Any) -> None:
    """One query a request, (batch, heads, width): packed queries of length 1."""
    (query,) = draw(rng, (3, 4, 8))
    theirs, _ = flashinfer_batch_prefill(query, pools, qo_indptr=[0, 1, 2, 3], **PAGED)
    cache = PagedKVCache(*pools, BLOCKS, LENGTHS, layout="...LHE")
    close(cache.attend(query, cu_seqlens_q=range(4)), theirs)


def test_the_merged_states_of_flashinfer(rng: np.random.Generator) -> None:
    """Held as there, (length, heads, width) and (length, heads), and merged here."""
    query, key, value = draw(rng, (7, 4, 8), (12, 2, 8), (12, 2, 8))
    states = [
        attention_state(query, key[part], value[part], layout="...LHE", lse_base=2)
        for part in (slice(0, 5), slice(5, 12))
    ]
    peer_states = [(state.output, state.lse.T) for state in states]
    v, s = flashinfer_merge_state(*peer_states[0], *peer_states[1])
    turned = [sdpa_xp.AttentionState(v, s.T) for v, s in peer_states]
    merged = sdpa_xp.merge_states(turned, lse_base=2, layout="...LHE")
    close(merged.output, v)
    close(merged.lse.T, s)


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
    with pytest.raises(TypeError, match=r"`\.values\(\)` and `\.offsets\(\)` of a jagged tensor to `varlen"):
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
