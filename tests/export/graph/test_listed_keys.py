"""Lists of keys in graphs: inputs, which `verify` draws, and lists that the graph chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import run

from sdpa_xp import masks, scaled_dot_product_attention, top_keys
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify, verify_layer


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("size", [1, 5])
def test_verify_draws_lists_that_the_mask_takes(size: int) -> None:
    query, key = (TensorSpec("float32", (2, 2, n, 8)) for n in (6, 12))
    lists = TensorSpec("int64", (2, 1, -(-6 // size), 4))
    mask = masks.keys(lists, size) & masks.causal()
    assert verify(export_attention(query, key, key, mask)).agrees

    def layer(query: Any, key: Any, lists: Any) -> Any:
        return scaled_dot_product_attention(query, key, key, masks.keys(lists, size))

    model = to_onnx(layer, query, key, lists)
    assert verify_layer(model, layer).agrees
    assert not verify_layer(model, lambda query, key, lists: 0 * layer(query, key, lists)).agrees


def test_lists_that_a_run_passes_or_that_the_graph_chooses(rng: np.random.Generator) -> None:
    def passed(query: Any, key: Any, value: Any, lists: Any) -> Any:
        return scaled_dot_product_attention(query, key, value, masks.keys(lists))

    def chosen(query: Any, key: Any, value: Any) -> Any:
        return passed(query, key, value, top_keys(query, key, 3, is_causal=True))

    specs = [TensorSpec("float32", ("B", heads, 12, 8)) for heads in (4, 2, 2)]
    arrays = [rng.standard_normal((3, heads, 12, 8)).astype(np.float32) for heads in (4, 2, 2)]
    lists = rng.integers(-1, 12, (2, 12, 3)).astype(np.int32)
    cases = (passed, [*specs, TensorSpec("int32", (2, 12, 3))], [*arrays, lists]), (chosen, specs, arrays)
    for layer, inputs, values in cases:
        model = to_onnx(layer, *inputs)
        names = [value.name for value in model.graph.input]
        (result,) = run(model, dict(zip(names, values, strict=True))).values()
        np.testing.assert_allclose(result, layer(*values), atol=1e-6)
