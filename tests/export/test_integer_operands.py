"""Lengths, offsets and ids may be of any integer dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention, verify

QUERY, KEY = TensorSpec("float32", ("B", 4, "L", 8)), TensorSpec("float32", ("B", 4, "S", 8))
PAST = TensorSpec("float32", ("B", 4, "P", 8))
DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

CALLS: dict[str, Callable[[str], dict[str, Any]]] = {
    "padding": lambda dtype: {"attn_mask": masks.padding(TensorSpec(dtype, ("B",)))},
    "causal": lambda dtype: {"attn_mask": masks.causal(TensorSpec(dtype, ("B",)))},
    "document": lambda dtype: {
        "attn_mask": masks.document(TensorSpec(dtype, ("B", "L")), TensorSpec(dtype, ("B", "S")))
    },
    "past_lengths": lambda dtype: {
        "past_key": PAST,
        "past_value": PAST,
        "past_lengths": TensorSpec(dtype, ("B",)),
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_any_integer_dtype(call: str, dtype: str) -> None:
    """Also at lengths beyond what an int8 holds, which `verify` tries."""
    assert verify(export_attention(QUERY, KEY, KEY, **CALLS[call](dtype)), provider="cpu").agrees


@pytest.mark.parametrize("call", CALLS)
def test_no_other_dtype(call: str) -> None:
    with pytest.raises(TypeError, match=r"^export_attention: .* must hold integers; got .*dtype=bool"):
        export_attention(QUERY, KEY, KEY, **CALLS[call]("bool"))
