"""What a call may ask, by what it is about: each feature alone, with how the library and a graph compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sdpa_xp import biases, masks
from sdpa_xp_export._agree import cases
from sdpa_xp_export._agree import library_calls as library
from sdpa_xp_export._agree.library_calls import Compute
from sdpa_xp_export._call.call import ExportCall, ExportOptions
from sdpa_xp_export._call.checking import checked_call
from sdpa_xp_export.spec import TensorSpec

LENGTHS = cases.LENGTHS | {"P": 14, "R": 40}
QUERY_IDS, KEY_IDS = [0] * 4 + [1] * 9 + [2] * 6, [0] * 10 + [1] * 8 + [2] * 15
"""Documents of a packed row, of which no two are as long."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A call, and how the library computes its one output."""

    call: ExportCall
    compute: Compute = library.attention
    no_graph: str = ""
    """Why there is no graph of it; nothing where there is one."""


def features(dtype: str) -> dict[str, Feature]:
    """Each feature by its name; batch and lengths are symbols, but where a fused operator wants numbers."""
    return (
        {name: Feature(call) for name, call in cases.basic_calls(dtype).items()}
        | _masks(dtype)
        | _biases(dtype)
        | _rules(dtype)
        | _outputs(dtype)
        | _caches(dtype)
    )


def _call(query: TensorSpec, key: TensorSpec, **rules: Any) -> ExportCall:
    return checked_call("features", query, key, key, ExportOptions(**rules))


def _tokens(dtype: str, length: int | str, heads: int = 8, batch: int | str = "B") -> TensorSpec:
    return TensorSpec(dtype, (batch, heads, length, 32))


def _given(dtype: str, *shape: int | str) -> Any:
    """A spec where a mask or a bias takes an array."""
    return TensorSpec(dtype, shape)


def _masks(dtype: str) -> dict[str, Feature]:
    query, key, entry = _tokens(dtype, "L"), _tokens(dtype, "S"), _given("int64", "B")
    ids = _given("int64", "B", "L"), _given("int64", "B", "S")
    made = {
        'masks.causal("lower_right")': masks.causal("lower_right"),
        "masks.causal(offsets)": masks.causal(entry),
        "masks.sliding_window": masks.sliding_window(3, 2, offset="lower_right"),
        "masks.padding": masks.padding(entry),
        "masks.padding, of queries too": masks.padding(entry, entry),
        "masks.document": masks.document(*ids),
        "masks.prefix": masks.causal() | masks.prefix(entry),
        "masks.chunked": masks.chunked(4),
        "masks.dilated": masks.dilated(3),
        "masks.from_array": masks.causal() & masks.from_array(_given("bool", "B", 1, 1, "S")),
        "masks.from_function": masks.from_function(lambda b, h, i, j: (i + j + h + b) % 3 != 0),
        "masks combined": ~masks.sliding_window(1, 1) & (masks.padding(entry) | masks.chunked(5)),
    }
    own, shared = (_tokens(dtype, "L", heads, batch=2) for heads in (8, 2))
    fused = {"as many keys as queries, causal": _call(own, shared, is_causal=True)}
    return {name: Feature(_call(query, key, attn_mask=mask)) for name, mask in made.items()} | {
        name: Feature(call) for name, call in fused.items()
    }


def _biases(dtype: str) -> dict[str, Feature]:
    query, key = _tokens(dtype, "L"), _tokens(dtype, "S")
    table = _given(dtype, 16, 8)
    made = {
        "biases.alibi": biases.alibi(8),
        "biases.relative": biases.relative(table, max_distance=8),
        "biases.from_function": biases.from_function(lambda score, *_indices: score * 0.5),
        "a sum of biases": biases.relative(table, bidirectional=False) + biases.alibi(8),
    }
    return {name: Feature(_call(query, key, bias=bias)) for name, bias in made.items()}


def _rules(dtype: str) -> dict[str, Feature]:
    query, key = _tokens(dtype, "L"), _tokens(dtype, "S")
    swapped = (TensorSpec(dtype, ("B", length, heads, 32)) for length, heads in (("L", 8), ("S", 2)))
    rows, keys = (TensorSpec(dtype, (length, 32)) for length in ("L", "S"))
    held = "float64" if dtype == "float64" else "float32"
    return {
        "learned scale": Feature(_call(query, key, scale=TensorSpec(held, (8, 1, 1)))),
        "sinks": Feature(_call(query, key, sinks=TensorSpec(held, (8,)))),
        'softmax_dtype="float64"': Feature(_call(query, key, softmax_dtype="float64")),
        'layout="...LHE"': Feature(_call(*swapped, is_causal=True, layout="...LHE")),
        "two axes": Feature(_call(rows, keys, is_causal=True)),
        "dot_product_attention": Feature(
            _call(query, key, is_causal=True, scale=0.3), library.by_the_names_of_jax
        ),
    }


def _outputs(dtype: str) -> dict[str, Feature]:
    query, key, entry = _tokens(dtype, "L"), _tokens(dtype, "S"), _given("int64", "B")
    rules: dict[str, Any] = {"attn_mask": masks.padding(entry), "softcap": 5.0}

    def of(name: str) -> ExportCall:
        return _call(query, key, **rules, outputs=(name,))

    merged = "no graph merges states: it gives output and lse of one of them"
    return {
        "attention_state.lse": Feature(of("lse"), library.lse),
        "attention_weights": Feature(of("weights"), library.weights),
        "attention_scores": Feature(of("scores"), library.scores),
        "merge_states": Feature(_call(query, key, **rules), library.merged, merged),
    }


def _caches(dtype: str) -> dict[str, Feature]:
    query, new = _tokens(dtype, "L"), _tokens(dtype, "L", heads=2)
    packed, packed_keys = (_tokens(dtype, len(ids), batch=1) for ids in (QUERY_IDS, KEY_IDS))
    past, room = (
        {f"past_{name}": _tokens(dtype, length, heads=2) for name in ("key", "value")} for length in ("P", "R")
    )
    lengths: dict[str, Any] = {"past_lengths": TensorSpec("int64", ("B",))}
    return {
        "KVCache": Feature(_call(query, new, **past, is_causal=True), library.cached),
        "PagedKVCache": Feature(_call(query, new, **room, **lengths, is_causal=True), library.paged),
        "varlen_attention": Feature(
            _call(packed, packed_keys, attn_mask=masks.document(QUERY_IDS, KEY_IDS)),
            library.packed(QUERY_IDS, KEY_IDS),
        ),
    }
