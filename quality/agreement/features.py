"""The features of a call, each alone: how sdpa_xp computes it on arrays, and whether a graph does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import feature_calls
import numpy as np
from internals import (
    PORTABLE,
    Arrays,
    Compute,
    ExportCall,
    Feature,
    checked_call,
    library_arguments,
    random_inputs,
)

import sdpa_xp
from sdpa_xp import masks
from sdpa_xp_export import TensorSpec

# Numbers of queries and keys that no block divides, and more keys than queries.
LENGTHS = {"B": 2, "L": 19, "S": 33, "P": 14, "R": 40}
LONGER = ({"B": 1, "L": 130, "S": 141, "P": 150, "R": 288}, {"B": 1, "L": 3, "S": 1100, "P": 1100, "R": 1104})
"""More lengths, for calls with names for them: beyond a block of queries, and many keys for a few queries."""
QUERY_IDS, KEY_IDS = [0] * 4 + [1] * 9 + [2] * 6, [0] * 10 + [1] * 8 + [2] * 15
"""Documents of a packed row, all of different lengths."""
BLOCK_TABLES = [[[(head + i + j) % 3 > 0 for j in range(5)] for i in range(9)] for head in range(8)]
"""Which blocks of keys each block of queries attends to, for each head."""
PARENTS = [-1, 0, 0, 1, 1, -1, 5, 3]
"""Of each draft in a tree."""
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


def _append_and_attend(cache: Any, call: ExportCall, arrays: Mapping[str, Any]) -> Any:
    """Append the new tokens to the cache, and attend it."""
    arguments = _without(library_arguments(call, arrays), "key", "value", "layout")
    return cache.append(arrays["key"], arrays["value"]).attend(**arguments, **PORTABLE)


def _starts(ids: Sequence[int]) -> list[int]:
    """Return where each document begins, and where the last one ends."""
    return [0, *accumulate(list(ids).count(number) for number in range(max(ids) + 1))]


def _without(arguments: Arrays, *names: str) -> Arrays:
    return {name: value for name, value in arguments.items() if name not in names}


LIKE = {
    'masks.causal("lower_right")': "mask: causal, lower right",
    "masks.causal(offsets)": "mask: causal, an offset an entry",
    "masks.sliding_window": "mask: window, an offset an entry",
    "masks.padding": "mask: padding",
    "masks.padding, of queries too": "mask: padding, of queries, too",
    "masks.document": "mask: documents",
    "masks.prefix": "mask: prefix or causal",
    "masks.chunked, masks.dilated": "mask: chunked or dilated",
    "masks.from_array": "mask: array and causal",
    "masks.from_function": "mask: function",
    "masks combined": "mask: padding, window",
    "as many keys as queries, causal": "batch of two, causal",
    "biases.alibi": "bias: alibi",
    "biases.relative": "bias: relative",
    "biases.from_function": "bias: function of the scores",
    "a sum of biases": "bias: a sum, with padding",
    "learned scale": "scale an input",
    "sinks": "sinks",
    'layout="...LHE"': "layout, causal, grouped heads",
    "two axes": "two axes",
}
"""The features that are calls of `feature_calls`, by their names there."""


def features(dtype: str) -> dict[str, Feature]:
    """Return the features by name; batch and lengths are names, unless a fused operator needs numbers."""
    calls = feature_calls.features(dtype)
    same = {name: calls[name] for name in feature_calls.basic_calls(dtype)}
    same |= {name: replace(calls[other], outputs=("output",)) for name, other in LIKE.items()}
    return (
        {name: Feature(call) for name, call in same.items()}
        | _masks(dtype)
        | _rules(dtype)
        | _outputs(dtype)
        | _caches(dtype)
    )


def _call(query: TensorSpec, key: TensorSpec, value: TensorSpec | None = None, **rules: Any) -> ExportCall:
    return checked_call("features", query, key, value or key, **rules)


def _tokens(dtype: str, length: int | str, heads: int = 8, batch: int | str = "B") -> TensorSpec:
    return TensorSpec(dtype, (batch, heads, length, 32))


def _array(dtype: str, *shape: int | str) -> Any:
    """Return a spec, as Any: the types of masks and biases ask for arrays."""
    return TensorSpec(dtype, shape)


def _masks(dtype: str) -> dict[str, Feature]:
    """Return those that need lengths of their own."""
    by_name: dict[str, tuple[int, int | str, masks.Mask]] = {
        "masks.neighbourhood": (156, 156, masks.neighbourhood((12, 13), 2, dilation=(1, 2))),
        "masks.blocks": (130, 141, masks.blocks(BLOCK_TABLES, (16, 32))),
        "masks.tree": (len(PARENTS), "S", masks.tree(PARENTS, offset="lower_right")),
    }
    return {
        name: Feature(_call(_tokens(dtype, queries), _tokens(dtype, keys), attn_mask=mask))
        for name, (queries, keys, mask) in by_name.items()
    }


def _rules(dtype: str) -> dict[str, Feature]:
    query, key = _tokens(dtype, "L"), _tokens(dtype, "S")
    padding = masks.padding(_array("int64", "B"))
    return {
        'softmax_dtype="float64"': Feature(_call(query, key, softmax_dtype="float64")),
        "dot_product_attention": Feature(_call(query, key, is_causal=True, scale=0.3), dot_product),
        "reproducible=True": Feature(
            _call(query, key, is_causal=True, attn_mask=padding),
            by("scaled_dot_product_attention", reproducible=True),
            "each runtime adds in an order of its own",
        ),
    }


def _outputs(dtype: str) -> dict[str, Feature]:
    query, key, entry = _tokens(dtype, "L"), _tokens(dtype, "S"), _array("int64", "B")
    rules: dict[str, Any] = {"attn_mask": masks.padding(entry), "softcap": 5.0}

    def call_for(name: str) -> ExportCall:
        return _call(query, key, **rules, outputs=(name,))

    merged = "no graph merges states: it gives output and lse of one of them"
    return {
        "attention_state.lse": Feature(call_for("lse"), by("attention_state", field="lse")),
        "attention_weights": Feature(call_for("weights"), by("attention_weights", "value")),
        "attention_scores": Feature(call_for("scores"), by("attention_scores", "value", "sinks")),
        "attention_statistics": Feature(
            call_for("key_sums"), by("attention_statistics", "value", field="key_sums", of="key_sums")
        ),
        "merge_states": Feature(_call(query, key, **rules), merged_halves, merged),
    }


def _caches(dtype: str) -> dict[str, Feature]:
    query, new = _tokens(dtype, "L"), _tokens(dtype, "L", heads=2)
    packed, packed_keys = (_tokens(dtype, len(ids), batch=1) for ids in (QUERY_IDS, KEY_IDS))
    past, room = (
        {f"past_{name}": _tokens(dtype, length, heads=2) for name in ("key", "value")} for length in ("P", "R")
    )
    tokens, padding = _tokens(dtype, "S", heads=2), masks.padding(_array("int64", "B"))
    traced = "`export_attention` has no quantised caches; `to_onnx` traces them"
    lengths: dict[str, Any] = {"past_lengths": TensorSpec("int64", ("B",))}
    return {
        "KVCache": Feature(_call(query, new, **past, is_causal=True), cached),
        "PagedKVCache": Feature(_call(query, new, **room, **lengths, is_causal=True), paged),
        **{
            f"KVCache.from_stored, {codes}": Feature(
                _call(query, tokens, attn_mask=padding), quantised(codes), traced
            )
            for codes in LARGEST_CODE
        },
        "varlen_attention": Feature(
            _call(packed, packed_keys, attn_mask=masks.document(QUERY_IDS, KEY_IDS)), varlen(QUERY_IDS, KEY_IDS)
        ),
    }


def feature_jobs(dtype: str, seed: int = 0) -> dict[str, Feature]:
    """Return each of `features` with its inputs."""
    rng = np.random.default_rng(seed)
    stored = {f"KVCache.from_stored, {codes}": storable(codes) for codes in LARGEST_CODE}
    jobs = {}
    for name, feature in features(dtype).items():
        several = (LENGTHS, *LONGER) if {"L", "S"} & {*feature.call.symbols} else (LENGTHS,)
        drawn = [random_inputs(feature.call, lengths, rng) for lengths in several]
        jobs[name] = replace(feature, inputs=tuple(map(stored.get(name, dict), drawn)))
    return jobs
