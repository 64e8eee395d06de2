"""Calls with wide heads, some of them grouped: what decoders compute on a GPU."""

from __future__ import annotations

from typing import Any

from internals import ExportCall, checked_call

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec

LENGTHS = TensorSpec("int64", ("B",))


def calls(dtype: str) -> dict[str, ExportCall]:
    """Calls of 8 query heads and 2 key heads of width 64, each with one feature."""
    query = TensorSpec(dtype, ("B", 8, "L", 64))
    key = TensorSpec(dtype, ("B", 2, "S", 64))
    new = TensorSpec(dtype, ("B", 2, "L", 64))
    past = TensorSpec(dtype, ("B", 2, "P", 64))
    plain = {"query": query, "key": key, "value": key}
    step = {"query": query, "key": new, "value": new, "past_key": past, "past_value": past, "is_causal": True}
    ids = TensorSpec("int64", ("B", "L")), TensorSpec("int64", ("B", "S"))
    window = masks.causal("lower_right") & masks.sliding_window(4, 0, offset="lower_right")
    rules: dict[str, dict[str, Any]] = {
        "plain": plain,
        "fixed": dict.fromkeys(("query", "key", "value"), TensorSpec(dtype, (2, 8, 32, 64))),
        "causal": plain | {"is_causal": True},
        "fixed batch, causal": dict.fromkeys(("query", "key", "value"), TensorSpec(dtype, (2, 8, "L", 64)))
        | {"is_causal": True},
        "causal, grouped": plain | {"key": new, "value": new, "is_causal": True},
        "softcap, scale": plain | {"softcap": 5.0, "scale": -0.3},
        "learned scale": plain | {"scale": TensorSpec(dtype, (8, 1, 1))},
        "boolean": plain | {"attn_mask": TensorSpec("bool", ("B", 1, "L", "S"))},
        "floating": plain | {"attn_mask": TensorSpec(dtype, ("L", "S"))},
        "two biases": plain
        | {"attn_mask": TensorSpec(dtype, ("S",)), "bias": TensorSpec(dtype, (8, "L", "S"))},
        "padding": plain | {"attn_mask": masks.padding(LENGTHS)},
        "window": plain | {"attn_mask": window & masks.padding(LENGTHS, LENGTHS)},
        "documents": plain | {"attn_mask": masks.document(*ids) | ~masks.prefix(LENGTHS)},
        "patterns": plain | {"attn_mask": masks.chunked(4) & masks.dilated(2)},
        "function": plain | {"attn_mask": masks.from_function(lambda b, h, i, j: (i - j) % 3 == (b + h) // 2)},
        "alibi": plain | {"bias": biases.alibi(8)},
        "relative": plain | {"bias": biases.relative(TensorSpec(dtype, (32, 8)))},
        "sinks": plain | {"sinks": TensorSpec(dtype, (8,))},
        "all outputs": plain | {"is_causal": True, "outputs": ("output", "lse", "weights", "scores")},
        "lse": plain | {"outputs": ("output", "lse")},
        "cache": step,
        "padded cache": step | {"past_lengths": LENGTHS},
        "layout": {name: TensorSpec(dtype, ("B", "L", 8, 64)) for name in ("query", "key", "value")}
        | {"layout": "...LHE"},
    }
    return {
        f"64 wide, {name}": checked_call("calls", rule.pop("query"), rule.pop("key"), rule.pop("value"), **rule)
        for name, rule in rules.items()
    }
