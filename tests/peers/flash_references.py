"""What flash-attention and FlashInfer document of packed and paged calls, in plain float64 loops.

Arrays have the peers' axes: (length, heads, width) of one sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
State = tuple[Floats, Floats]
"""An output, and the logarithm of the sum of exp(score)."""


def flash_attention_state(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    softmax_scale: float | None = None,
    custom_mask: Any = None,
) -> State:
    """The docstring of flash_attn_func (Dao-AILab/flash-attention), query for query: (L, Hq, E), (S, H, E).

    causal and window_size are aligned to the bottom right: query i stands at i + seqlen_k - seqlen_q. Returns
    (L, Hq, Ev) and softmax_lse, (Hq, L). FlashInfer alone has a custom_mask, (L, S), whose True may attend.
    """
    (queries, heads, width), (keys, groups, _) = query.shape, key.shape
    scale = 1 / math.sqrt(width) if softmax_scale is None else softmax_scale
    left, right = window_size
    output, lse = np.zeros((queries, heads, value.shape[-1])), np.full((heads, queries), -np.inf)
    for i, head in itertools.product(range(queries), range(heads)):
        position, group = i + keys - queries, head // (heads // groups)
        allowed = [
            j
            for j in range(keys)
            if (not causal or j <= position)
            and (left < 0 or j >= position - left)
            and (right < 0 or j <= position + right)
            and (custom_mask is None or custom_mask[i, j])
        ]
        if not allowed:
            continue  # "If the row of the mask is all zero, the output will be zero."
        scores = key[allowed, group].astype(np.float64) @ query[i, head] * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[head] * np.abs(position - np.asarray(allowed))
        weights = np.exp(scores - scores.max())
        output[i, head] = weights / weights.sum() @ value[allowed, group]
        lse[head, i] = scores.max() + np.log(weights.sum())
    return output, lse


def flash_attention(query: Any, key: Any, value: Any, **options: Any) -> Floats:
    """The output alone, as of flash_attn_func."""
    return flash_attention_state(query, key, value, **options)[0]


def paged_tokens(pool: Any, blocks: Sequence[int], length: int) -> Any:
    """The first tokens of a sequence, out of blocks (P, size, heads, width)."""
    size = pool.shape[1]
    return np.concatenate([pool[:0, 0], *(pool[block] for block in blocks[: -(-length // size)])])[:length]


def packed(
    function: Callable[..., State],
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    *,
    by_sequence: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> State:
    """`function` of each sequence, one after the other: (total_q, heads, width) and (heads, total_q).

    Those of `by_sequence` have an entry for each sequence.
    """
    parts = []
    bounds = zip(itertools.pairwise(cu_seqlens_q), itertools.pairwise(cu_seqlens_k), strict=True)
    for n, ((a, b), (c, d)) in enumerate(bounds):
        entries = {name: x[n] for name, x in by_sequence.items()}
        parts.append(function(query[a:b], key[c:d], value[c:d], **entries, **options))
    outputs, lses = zip(*parts, strict=True)
    return np.concatenate(outputs), np.concatenate(lses, axis=-1)


def flash_attn_varlen_func(
    query: Any, pools: Sequence[Any], cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int], **options: Any
) -> State:
    """With a block_table: q is packed, and cu_seqlens_k has the lengths in the pools."""
    rows = [*zip(options.pop("block_table"), np.diff(cu_seqlens_k).tolist(), strict=True)]
    key, value = (np.concatenate([paged_tokens(pool, *row) for row in rows]) for pool in pools)
    return packed(flash_attention_state, query, key, value, cu_seqlens_q, cu_seqlens_k, **options)


def turned(x: Any, rows: Sequence[int], cos: Any, sin: Any, interleaved: bool) -> Any:
    """x, (L, H, E), with token i rotated by row `rows[i]` of the tables (P, width / 2)."""
    half = cos.shape[-1]
    one, other = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    c, s = (np.asarray(table, np.float64)[list(rows), None, :] for table in (cos, sin))
    result = np.asarray(x, np.float64).copy()
    result[..., one] = x[..., one] * c - x[..., other] * s
    result[..., other] = x[..., one] * s + x[..., other] * c
    return result


def flash_attn_with_kvcache(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    cache_seqlens: Sequence[int],
    rotary: tuple[Any, Any] | None = None,
    rotary_interleaved: bool = True,
    cache_batch_idx: Sequence[int] | None = None,
    cache_leftpad: Sequence[int] | None = None,
    block_table: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> State:
    """Its docstring: (batch, seqlen, heads, width), and softmax_lse, (batch, heads, seqlen).

    - k and v are written behind cache_seqlens, then the queries attend to what is there from cache_leftpad on.
    - A key is rotated "at indices cache_seqlens, cache_seqlens + 1, etc."; a query too "if causal or local",
      and otherwise "at indices cache_seqlens only".
    """
    is_local = options.get("causal", False) or tuple(options.get("window_size", (-1, -1))) != (-1, -1)
    parts = []
    for n, length in enumerate(cache_seqlens):
        row = n if cache_batch_idx is None else cache_batch_idx[n]
        tokens = [
            cache[row][:length] if block_table is None else paged_tokens(cache, block_table[n], length)
            for cache in (k_cache, v_cache)
        ]
        q, new = query[n], [x[n] for x in (k, v) if x is not None]
        if rotary is not None:
            places = [length + i * is_local for i in range(len(q))]
            q = turned(q, places, *rotary, rotary_interleaved)
            new[0] = turned(new[0], range(length, length + len(new[0])), *rotary, rotary_interleaved)
        if new:
            tokens = [np.concatenate(pair) for pair in zip(tokens, new, strict=True)]
        start = 0 if cache_leftpad is None else cache_leftpad[n]
        parts.append(flash_attention_state(q, *(x[start:] for x in tokens), **options))
    outputs, lses = zip(*parts, strict=True)
    return np.stack(outputs), np.stack(lses)


def flashinfer_append_paged_kv_cache(
    new: Any, pool: Any, kv_indices: Any, kv_indptr: Any, append_indptr: Any, seq_lens: Any
) -> None:
    """Writes ragged tokens (nnz, heads, width) into a pool: those of request b end at seq_lens[b].

    Its batch_indices and positions are those that get_batch_indices_positions(append_indptr, seq_lens) returns.
    """
    for b, (first, last) in enumerate(itertools.pairwise(append_indptr)):
        blocks = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        for i in range(first, last):
            place = seq_lens[b] - (last - i)
            pool[blocks[place // pool.shape[1]], place % pool.shape[1]] = new[i]


def flashinfer_batch_prefill(
    query: Any,
    pools: Sequence[Any],
    *,
    qo_indptr: Any,
    paged_kv_indptr: Any,
    paged_kv_indices: Any,
    paged_kv_last_page_len: Any,
    causal: bool = False,
    window_left: int = -1,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    custom_mask: Any = None,
) -> State:
    """BatchPrefillWithPagedKVCacheWrapper: plan(...), then run(..., return_lse=True).

    causal and window_left are aligned to the last query and key. A custom_mask, "flattened", has a boolean for
    each query and key of a request: (sum(q_len[i] * k_len[i]),). Returns (nnz, heads, width), and the logarithm
    to base 2, (nnz, heads).
    """
    parts, done = [], 0
    for b, (first, last) in enumerate(itertools.pairwise(qo_indptr)):
        blocks = paged_kv_indices[paged_kv_indptr[b] : paged_kv_indptr[b + 1]]
        length = (len(blocks) - 1) * pools[0].shape[1] + paged_kv_last_page_len[b]
        pairs = (last - first) * length
        mask = None if custom_mask is None else custom_mask[done : done + pairs].reshape(-1, length)
        done += pairs
        output, lse = flash_attention_state(
            query[first:last],
            *(paged_tokens(pool, blocks, length) for pool in pools),
            causal=causal,
            window_size=(window_left, -1),
            softcap=logits_soft_cap or 0.0,
            softmax_scale=sm_scale,
            custom_mask=mask,
        )
        parts.append((output, lse.T / math.log(2)))
    outputs, lses = zip(*parts, strict=True)
    return np.concatenate(outputs), np.concatenate(lses)


def flashinfer_merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> State:
    """Outputs (length, heads, width) and logarithms to base 2 (length, heads), of two parts of the keys."""
    s = np.logaddexp2(s_a.astype(np.float64), s_b)
    v = sum(v * np.exp2(part - s)[..., None] for v, part in ((v_a, s_a), (v_b, s_b)))
    return np.asarray(v), s


def xformers(query: Any, key: Any, value: Any, q_seqlen: Any, kv_seqlen: Any, causal: str) -> Floats:
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
