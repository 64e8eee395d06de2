"""The inputs of a graph as arguments of the reference, and of the library.

What they mean is tested where a graph is held against both: with a cache in tests/export/forms/test_caches.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from calls import draw_named
from internals import ExportCall, checked_call, reference_inputs

from sdpa_xp import biases
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
