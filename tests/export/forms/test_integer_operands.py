"""Lengths, offsets and ids may be of any integer dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from short_runs import assert_right

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention

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
    assert_right(export_attention(QUERY, KEY, KEY, **CALLS[call](dtype)))


FAR = 2**29 + 1
"""Beyond what the library takes; an int64 in a graph would wrap for some of these."""
OUT_OF_RANGE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "causal": lambda n: {"attn_mask": masks.causal(n)},
    "window": lambda n: {"attn_mask": masks.sliding_window(2, None, offset=n)},
    "open window": lambda n: {"attn_mask": masks.sliding_window(None, None, offset=n)},
    "part of a mask": lambda n: {"attn_mask": ~(masks.causal() | masks.causal(n))},
    "prefix": lambda n: {"attn_mask": masks.prefix(n)},
    "key_lengths": lambda n: {"attn_mask": masks.padding(n)},
    "query_lengths": lambda n: {"attn_mask": masks.padding(None, n)},
    "alibi": lambda n: {"bias": biases.alibi(2, offset=n)},
    "relative": lambda n: {"bias": biases.relative(np.ones((8, 2), np.float32), offset=n)},
}


@pytest.mark.parametrize("form", ["primitive", "tiled", "attention"])
@pytest.mark.parametrize("number", [FAR, -FAR, 2**63 - 1, -(2**63), 2**70])
@pytest.mark.parametrize("call", OUT_OF_RANGE)
def test_what_the_library_refuses(call: str, number: int, form: str) -> None:
    """An integer, lists and an array; the relative bias takes an integer alone."""
    spec, array = TensorSpec("float32", (1, 2, 5, 8)), np.ones((1, 2, 5, 8), np.float32)
    arrays = [np.asarray([number]), [np.int64(number)]] if abs(number) < 2**63 else []
    for operand in [number] if call == "relative" else [number, [number], *arrays]:
        with pytest.raises(ValueError, match="must be at"):
            scaled_dot_product_attention(array, array, array, **OUT_OF_RANGE[call](operand))
        with pytest.raises(ValueError, match="must be at"):
            export_attention(spec, spec, spec, **OUT_OF_RANGE[call](operand), form=form)


@pytest.mark.parametrize("form", ["primitive", "tiled", "attention"])
@pytest.mark.parametrize(
    ("call", "number"), [("prefix", -1), ("key_lengths", -1), ("key_lengths", 6), ("query_lengths", 6)]
)
def test_lengths_within_their_axis(call: str, number: int, form: str) -> None:
    """As far as they are known: of 5 tokens 6 are too many, and of L tokens are not."""
    spec, open_spec = (TensorSpec("float32", (1, 2, n, 8)) for n in (5, "L"))
    for operand in (number, [number], np.asarray([number])):
        with pytest.raises(ValueError, match="must be at"):
            export_attention(spec, spec, spec, **OUT_OF_RANGE[call](operand), form=form)
        if number > 0:
            export_attention(open_spec, open_spec, open_spec, **OUT_OF_RANGE[call](operand), form=form)


@pytest.mark.parametrize("form", ["primitive", "tiled", "attention"])
def test_the_furthest_offsets(form: str) -> None:
    spec = TensorSpec("float32", (1, 2, 5, 8))
    for number in (2**29, -(2**29)):
        model = export_attention(spec, spec, spec, masks.causal([number]), form=form)
        assert_right(model)
