"""The basic calls on which every backend and every exported graph is tested, by name."""

from __future__ import annotations

from typing import Any

from sdpa_xp_export._call.call import ExportCall, checked_call
from sdpa_xp_export.spec import TensorSpec

LENGTHS = {"B": 2, "L": 19, "S": 33}


def basic_calls(dtype: str) -> dict[str, ExportCall]:
    """Return calls with one feature each, then one with all; batch and lengths are names."""
    query = TensorSpec(dtype, ("B", 8, "L", 32))
    key = TensorSpec(dtype, ("B", 8, "S", 32))
    shared = TensorSpec(dtype, ("B", 2, "S", 32))
    narrow = TensorSpec(dtype, ("B", 2, "S", 16))
    padding = TensorSpec("bool", ("B", 1, 1, "S"))
    pairs = TensorSpec("bool", ("L", "S"))
    term = TensorSpec(dtype, (8, "L", "S"))

    def call(key: TensorSpec, value: TensorSpec, **rules: Any) -> ExportCall:
        return checked_call("calls", query, key, value, **rules)

    return {
        "plain": call(key, key),
        "is_causal": call(key, key, is_causal=True),
        "padding mask (B, 1, 1, S)": call(key, key, attn_mask=padding),
        "boolean mask with empty rows": call(key, key, attn_mask=pairs),
        "floating mask": call(key, key, attn_mask=term),
        "boolean mask and bias": call(key, key, attn_mask=pairs, bias=term),
        "grouped heads, Ev != E": call(shared, narrow),
        "scale": call(key, key, scale=0.5),
        "softcap": call(key, key, softcap=5.0),
        "all of it": call(
            shared, narrow, attn_mask=padding, bias=term, is_causal=True, scale=-0.3, softcap=5.0
        ),
    }
