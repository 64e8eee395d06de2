"""The inputs of a graph as arguments of the reference, and of the library.

What they mean is tested where a graph is held against both: with a cache in tests/export/forms/test_caches.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from calls import draw_named
from internals import ExportCall, checked_call, library_arguments, reference_inputs, with_arrays

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec

B, HQ, H, E, NEW = 3, 4, 2, 8, 2
SHAPES = {"query": (B, HQ, NEW, E), "key": (B, H, NEW, E), "value": (B, H, NEW, 5)}


def drawn() -> dict[str, Any]:
    return draw_named(np.random.default_rng(11), SHAPES)


def call_of(arrays: dict[str, Any], **rules: Any) -> ExportCall:
    specs = [TensorSpec(x.dtype.name, x.shape) for x in arrays.values()]
    return checked_call("test", *specs, **rules)


def test_a_bias_of_all_rows_gets_indices_of_any_library() -> None:
    """An array on a GPU cannot index one of NumPy."""
    arrays = drawn()
    call = call_of(arrays, bias=biases.from_function(lambda score, b, h, i, j: (score, i, j)))
    query, key = object(), object()
    (bias,) = reference_inputs(call, arrays)["bias"]
    assert bias(0, 0, 0, query, key) == (0, query, key)
    (bias,) = reference_inputs(call, arrays, rows=np.asarray([1]))["bias"]
    assert bias(0, 0, 0, 0, key) == (0, 1, key)


def ints(*values: Any) -> np.ndarray:
    return np.asarray(values, np.int64)


def test_arguments_of_the_library() -> None:
    arrays = drawn()
    mask = masks.padding(TensorSpec("int64", (B,)))
    call = call_of(
        arrays,
        attn_mask=mask,
        bias=TensorSpec("float32", (NEW,)),
        is_causal=True,
        softcap=2.0,
        softmax_dtype="float64",
    )
    lengths, bias = ints(1, 2, 0), np.ones(NEW, np.float32)
    arguments = library_arguments(call, arrays | {"key_lengths": lengths, "bias": bias})
    padding = arguments.pop("attn_mask")
    np.testing.assert_array_equal(padding.key_lengths, lengths)
    np.testing.assert_array_equal(arguments.pop("bias"), bias)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(arguments.pop(name), arrays[name])
    assert arguments == {
        "scale": 1 / math.sqrt(E),
        "sinks": None,
        "is_causal": True,
        "softcap": 2.0,
        "softmax_dtype": "float64",
        "layout": "...HLE",
    }


def test_inputs_within_a_mask_are_bound() -> None:
    arrays = drawn()
    call = call_of(arrays, attn_mask=masks.causal() | ~masks.padding(TensorSpec("int64", (B,))))
    bound_mask = with_arrays(call.attn_mask, arrays | {"key_lengths": ints(1, 2, 0)})
    i, j = np.ogrid[:NEW, :NEW]
    wanted = (j <= i) | (j >= ints(1, 2, 0).reshape(-1, 1, 1, 1))
    np.testing.assert_array_equal(
        masks.to_array(bound_mask, (B, HQ, NEW, NEW)), np.broadcast_to(wanted, (B, HQ, NEW, NEW))
    )
