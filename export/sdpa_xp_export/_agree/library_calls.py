"""Compute the call of a feature with sdpa_xp, on arrays of any library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import sdpa_xp
from sdpa_xp import masks
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._verify.pair_terms import Arrays
from sdpa_xp_export._verify.reference_inputs import library_arguments

Compute: TypeAlias = Callable[[Any, ExportCall, Mapping[str, Any]], Any]
"""A namespace, a call, and its inputs as arrays of that namespace -> the one output of the call."""

PORTABLE: dict[str, Any] = {"implementation": "xp"}
BLOCK = 4
"""Tokens in a block of a paged cache."""


def attention(_xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    return sdpa_xp.scaled_dot_product_attention(**library_arguments(call, arrays), **PORTABLE)


def lse(_xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    return sdpa_xp.attention_state(**library_arguments(call, arrays), **PORTABLE).lse


def weights(_xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    return sdpa_xp.attention_weights(**_without(library_arguments(call, arrays), "value"), **PORTABLE)


def scores(_xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    arguments = _without(library_arguments(call, arrays), "value", "sinks")
    return sdpa_xp.attention_scores(**arguments, **PORTABLE)


def merged(_xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    """Merge the states over the first half of the keys and over the second."""
    arguments = library_arguments(call, arrays)
    query, key = arguments["query"], arguments["key"]
    pairs = (*query.shape[:-1], key.shape[-2])
    allowed = masks.to_array(arguments["attn_mask"], pairs, like=query)
    states = []
    for keys in (slice(0, pairs[-1] // 2), slice(pairs[-1] // 2, pairs[-1])):
        part = {name: arguments[name][..., keys, :] for name in ("key", "value")}
        part["attn_mask"] = allowed[..., keys]
        states.append(sdpa_xp.attention_state(**arguments | part, **PORTABLE))
    return sdpa_xp.merge_states(states).output


def dot_product(xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    swapped = {name: xp.permute_dims(arrays[name], (0, 2, 1, 3)) for name in ("query", "key", "value")}
    rules: dict[str, Any] = {"scale": call.scale, "is_causal": call.is_causal, **PORTABLE}
    return xp.permute_dims(sdpa_xp.dot_product_attention(**swapped, **rules), (0, 2, 1, 3))


def cached(_xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    cache = sdpa_xp.KVCache(arrays["past_key"], arrays["past_value"])
    return _append_and_attend(cache, call, arrays)


def paged(xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    """Attend a cache with room, cut into blocks."""
    entries, heads, room, width = arrays["past_key"].shape
    count = room // BLOCK

    def blocks(past: Any) -> Any:
        split = xp.reshape(past, (entries, heads, count, BLOCK, width))
        return xp.reshape(xp.permute_dims(split, (0, 2, 1, 3, 4)), (entries * count, heads, BLOCK, width))

    table = [[entry * count + number for number in range(count)] for entry in range(entries)]
    lengths = [int(arrays["past_lengths"][entry]) for entry in range(entries)]
    pools = blocks(arrays["past_key"]), blocks(arrays["past_value"])
    return _append_and_attend(sdpa_xp.PagedKVCache(*pools, table, lengths), call, arrays)


def packed(query_ids: Sequence[int], key_ids: Sequence[int]) -> Compute:
    """Return how packed queries and keys are computed whose documents have these ids, which rise from 0."""
    starts_q, starts_k = _starts(query_ids), _starts(key_ids)

    def compute(_xp: Any, _call: ExportCall, arrays: Mapping[str, Any]) -> Any:
        query, key, value = (arrays[name][0, ...] for name in ("query", "key", "value"))
        rules: dict[str, Any] = {"layout": "...HLE", **PORTABLE}
        return sdpa_xp.varlen_attention(query, key, value, starts_q, starts_k, **rules)[None, ...]

    return compute


def _starts(ids: Sequence[int]) -> list[int]:
    """Return where each document begins, and where the last one ends."""
    return [0, *accumulate(list(ids).count(number) for number in range(max(ids) + 1))]


def _append_and_attend(cache: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    """Append the new tokens to the cache, and attend it."""
    arguments = _without(library_arguments(call, arrays), "key", "value", "layout")
    return cache.append(arrays["key"], arrays["value"]).attend(**arguments, **PORTABLE)


def _without(arguments: Arrays, *names: str) -> Arrays:
    return {name: value for name, value in arguments.items() if name not in names}
