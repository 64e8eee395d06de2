"""The features of a call, each alone: how sdpa_xp computes it on arrays, and whether a graph does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

import sdpa_xp
from sdpa_xp import biases, masks
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask

from .._call.call import OPTIONS, ExportCall, checked_call
from .._call.operands import with_operands
from .._verify.expected import Arrays, numbers
from ..spec import TensorSpec

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


@dataclass(frozen=True, slots=True)
class Feature:
    """A call, and how sdpa_xp computes its one output."""

    call: ExportCall
    compute: Compute = attention
    no_graph: str = ""
    """Why no graph computes the call; empty if one does."""
    adapt: Callable[[Arrays], Arrays] = dict
    """Changes random inputs to those that the feature is compared on."""
    inputs: tuple[Arrays, ...] = ()
    """The inputs that it is compared on, of several lengths; the first are timed."""


def features(dtype: str) -> dict[str, Feature]:
    """Return the features by name; batch and lengths are names, unless a fused operator needs numbers."""
    return (
        {name: Feature(call) for name, call in basic_calls(dtype).items()}
        | _masks(dtype)
        | _biases(dtype)
        | _rules(dtype)
        | _outputs(dtype)
        | _caches(dtype)
    )


def basic_calls(dtype: str) -> dict[str, ExportCall]:
    """Return calls with one feature each, then one with all; batch and lengths are names."""
    query, key = _tokens(dtype, "L"), _tokens(dtype, "S")
    shared, narrow = _tokens(dtype, "S", heads=2), TensorSpec(dtype, ("B", 2, "S", 16))
    padding, pairs, term = _array("bool", "B", 1, 1, "S"), _array("bool", "L", "S"), _array(dtype, 8, "L", "S")
    together = {"attn_mask": padding, "bias": term, "is_causal": True, "scale": -0.3, "softcap": 5.0}
    return {
        "plain": _call(query, key),
        "is_causal": _call(query, key, is_causal=True),
        "padding mask (B, 1, 1, S)": _call(query, key, attn_mask=padding),
        "boolean mask with empty rows": _call(query, key, attn_mask=pairs),
        "floating mask": _call(query, key, attn_mask=term),
        "boolean mask and bias": _call(query, key, attn_mask=pairs, bias=term),
        "grouped heads, Ev != E": _call(query, shared, narrow),
        "scale": _call(query, key, scale=0.5),
        "softcap": _call(query, key, softcap=5.0),
        "all of it": _call(query, shared, narrow, **together),
    }


def _call(query: TensorSpec, key: TensorSpec, value: TensorSpec | None = None, **rules: Any) -> ExportCall:
    return checked_call("features", query, key, value or key, **rules)


def _tokens(dtype: str, length: int | str, heads: int = 8, batch: int | str = "B") -> TensorSpec:
    return TensorSpec(dtype, (batch, heads, length, 32))


def _array(dtype: str, *shape: int | str) -> Any:
    """Return a spec, as Any: the types of masks and biases ask for arrays."""
    return TensorSpec(dtype, shape)


def _masks(dtype: str) -> dict[str, Feature]:
    query, key, entry = _tokens(dtype, "L"), _tokens(dtype, "S"), _array("int64", "B")
    ids = _array("int64", "B", "L"), _array("int64", "B", "S")
    by_name = {
        'masks.causal("lower_right")': masks.causal("lower_right"),
        "masks.causal(offsets)": masks.causal(entry),
        "masks.sliding_window": masks.sliding_window(3, 2, offset="lower_right"),
        "masks.padding": masks.padding(entry),
        "masks.padding, of queries too": masks.padding(entry, entry),
        "masks.document": masks.document(*ids),
        "masks.prefix": masks.causal() | masks.prefix(entry),
        "masks.chunked": masks.chunked(4),
        "masks.dilated": masks.dilated(3),
        "masks.from_array": masks.causal() & masks.from_array(_array("bool", "B", 1, 1, "S")),
        "masks.from_function": masks.from_function(lambda b, h, i, j: (i + j + h + b) % 3 != 0),
        "masks combined": ~masks.sliding_window(1, 1) & (masks.padding(entry) | masks.chunked(5)),
    }
    all_heads, few_heads = (_tokens(dtype, "L", heads, batch=2) for heads in (8, 2))
    with_lengths: dict[str, tuple[int, int | str, Mask]] = {
        "masks.neighbourhood": (156, 156, masks.neighbourhood((12, 13), 2, dilation=(1, 2))),
        "masks.blocks": (130, 141, masks.blocks(BLOCK_TABLES, (16, 32))),
        "masks.tree": (len(PARENTS), "S", masks.tree(PARENTS, offset="lower_right")),
    }
    return (
        {name: Feature(_call(query, key, attn_mask=mask)) for name, mask in by_name.items()}
        | {"as many keys as queries, causal": Feature(_call(all_heads, few_heads, is_causal=True))}
        | {
            name: Feature(_call(_tokens(dtype, queries), _tokens(dtype, keys), attn_mask=mask))
            for name, (queries, keys, mask) in with_lengths.items()
        }
    )


def _biases(dtype: str) -> dict[str, Feature]:
    query, key = _tokens(dtype, "L"), _tokens(dtype, "S")
    table = _array(dtype, 16, 8)
    by_name = {
        "biases.alibi": biases.alibi(8),
        "biases.relative": biases.relative(table, max_distance=8),
        "biases.from_function": biases.from_function(lambda score, *_indices: score * 0.5),
        "a sum of biases": biases.relative(table, bidirectional=False) + biases.alibi(8),
    }
    return {name: Feature(_call(query, key, bias=bias)) for name, bias in by_name.items()}


def _rules(dtype: str) -> dict[str, Feature]:
    query, key = _tokens(dtype, "L"), _tokens(dtype, "S")
    swapped = [TensorSpec(dtype, ("B", length, heads, 32)) for length, heads in (("L", 8), ("S", 2))]
    rows, keys = (TensorSpec(dtype, (length, 32)) for length in ("L", "S"))
    padding = masks.padding(_array("int64", "B"))
    wide = "float64" if dtype == "float64" else "float32"  # scales and sinks may be wider than half tokens
    return {
        "learned scale": Feature(_call(query, key, scale=TensorSpec(wide, (8, 1, 1)))),
        "sinks": Feature(_call(query, key, sinks=TensorSpec(wide, (8,)))),
        'softmax_dtype="float64"': Feature(_call(query, key, softmax_dtype="float64")),
        'layout="...LHE"': Feature(_call(*swapped, is_causal=True, layout="...LHE")),
        "two axes": Feature(_call(rows, keys, is_causal=True)),
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
                _call(query, tokens, attn_mask=padding), quantised(codes), traced, storable(codes)
            )
            for codes in LARGEST_CODE
        },
        "varlen_attention": Feature(
            _call(packed, packed_keys, attn_mask=masks.document(QUERY_IDS, KEY_IDS)), varlen(QUERY_IDS, KEY_IDS)
        ),
    }
