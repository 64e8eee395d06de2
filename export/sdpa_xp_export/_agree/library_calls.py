"""How sdpa_xp computes each feature on the arrays of a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

import sdpa_xp
from sdpa_xp import masks
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask

from .._call.call import OPTIONS, ExportCall
from .._call.operands import with_operands
from .._verify.expected import Arrays, numbers

Compute: TypeAlias = Callable[[Any, ExportCall, Mapping[str, Any]], Any]
"""A namespace, a call, and its inputs as arrays of that namespace -> the one output of the call."""
# Vendors' kernels round in their own way, and a CPU has few of them; their tests are apart.
PORTABLE: dict[str, Any] = {"implementation": "xp"}
BLOCK = 4
"""Tokens in a block of a paged cache."""
LARGEST_CODE = {"int8": 127.0, "int4": 7.0}
"""Of a quantised cache, whose smallest code is its negative."""


def by(function: str, *without: str, field: str = "", **rules: object) -> Compute:
    """Return how a public function computes a call, or a `field` of its result, `without` some arguments."""

    def compute(_xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
        arguments = _without(library_arguments(call, arrays), *without)
        result = getattr(sdpa_xp, function)(**arguments, **rules, **PORTABLE)
        return getattr(result, field) if field else result

    return compute


attention = by("scaled_dot_product_attention")


def merged_halves(_xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    """Merge the states over the first half of the keys and over the second."""
    arguments = library_arguments(call, arrays)
    query, key = arguments["query"], arguments["key"]
    pairs = (*query.shape[:-1], key.shape[-2])
    allowed = masks.to_array(arguments["attn_mask"], pairs, like=query)
    states = []
    # The mask as an array: its lengths are of all keys, and would hide others in the second half.
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

    # The blocks of each entry in order, which is one of many tables; the pool has no other blocks.
    table = [[entry * count + number for number in range(count)] for entry in range(entries)]
    lengths = [int(arrays["past_lengths"][entry]) for entry in range(entries)]
    pools = blocks(arrays["past_key"]), blocks(arrays["past_value"])
    return _append_and_attend(sdpa_xp.PagedKVCache(*pools, table, lengths), call, arrays)


def quantised(dtype: str) -> Compute:
    """Return how a cache of that dtype is attended, whose tokens are `storable` in it."""

    def compute(xp: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
        stored = {}
        for name in ("key", "value"):
            wide = xp.astype(arrays[name], getattr(xp, call.accumulation_dtype))
            scale = xp.max(xp.abs(wide), axis=-1, keepdims=True) / LARGEST_CODE[dtype]
            codes = wide / scale
            codes = xp.where(xp.isnan(codes), 0.0, codes)  # the scale of a hidden token keeps its NaN
            if dtype == "int4":  # two codes in a byte, which has 8 for code 0
                codes = codes[..., ::2] + 16.0 * codes[..., 1::2] + 8.0 * 17.0
            stored[name] = xp.astype(codes, xp.int8 if dtype == "int8" else xp.uint8)
            stored[f"{name}_scale"] = scale
        cache = sdpa_xp.KVCache.from_stored(stored, dtype=arrays["key"].dtype)
        arguments = _without(library_arguments(call, arrays), "key", "value", "layout")
        return cache.attend(**arguments, **PORTABLE)

    return compute


def storable(dtype: str) -> Callable[[Arrays], Arrays]:
    """Return what rounds keys and values to those that a quantised cache stores without an error.

    A token is its codes times a power of two, and its largest code is that of `dtype`.
    """

    def rounded(arrays: Arrays) -> Arrays:
        tokens = {}
        for name in ("key", "value"):
            wide = arrays[name].astype(np.float64)
            step = np.max(np.abs(wide), axis=-1, keepdims=True) / LARGEST_CODE[dtype]
            codes = np.rint(wide / step)
            tokens[name] = (codes * 2.0 ** np.rint(np.log2(step))).astype(arrays[name].dtype)
        return arrays | tokens

    return rounded


def varlen(query_ids: Sequence[int], key_ids: Sequence[int]) -> Compute:
    """Return how packed queries and keys are computed whose documents have these ids, which rise from 0."""
    starts_q, starts_k = _starts(query_ids), _starts(key_ids)

    def compute(_xp: Any, _call: ExportCall, arrays: Mapping[str, Any]) -> Any:
        query, key, value = (arrays[name][0, ...] for name in ("query", "key", "value"))
        rules: dict[str, Any] = {"layout": "...HLE", **PORTABLE}
        return sdpa_xp.varlen_attention(query, key, value, starts_q, starts_k, **rules)[None, ...]

    return compute


def library_arguments(call: ExportCall, arrays: Mapping[str, Any]) -> Arrays:
    """Convert inputs of the graph to keywords of `sdpa_xp.scaled_dot_product_attention`, without the cache."""
    tokens = {name: arrays[name] for name in ("query", "key", "value")}
    names = (name for name, option in OPTIONS.items() if option.kind not in (None, "spec", "names"))
    return tokens | {name: with_inputs(getattr(call, name), arrays) for name in names}


def with_inputs(value: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a mask or a bias with the arrays of a run instead of its inputs, and an operand as its array."""
    if isinstance(value, Mask | Bias):
        return with_operands(value, lambda _, operand: with_inputs(operand, arrays))
    return numbers(value, arrays)


def _append_and_attend(cache: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    """Append the new tokens to the cache, and attend it."""
    arguments = _without(library_arguments(call, arrays), "key", "value", "layout")
    return cache.append(arrays["key"], arrays["value"]).attend(**arguments, **PORTABLE)


def _starts(ids: Sequence[int]) -> list[int]:
    """Return where each document begins, and where the last one ends."""
    return [0, *accumulate(list(ids).count(number) for number in range(max(ids) + 1))]


def _without(arguments: Arrays, *names: str) -> Arrays:
    return {name: value for name, value in arguments.items() if name not in names}
