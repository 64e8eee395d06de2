"""A length of 0 gives the right result or an error, and never ends the process."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quality.runtime.outcomes import runtime_of
from quality.runtime.releases import REDUCED, Graph, run_graphs
from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention
from sdpa_xp_export.forms.choice import FORMS

RULES: dict[str, dict[str, Any]] = {
    "all pairs": {},
    "causal": {"is_causal": True},
    "window": {"attn_mask": masks.sliding_window(3, 0)},
    "padding": {"attn_mask": masks.padding(TensorSpec("int64", ("B",)))},
    "mask": {"attn_mask": TensorSpec("bool", ("B", 1, "L", "S"))},
    "alibi": {"bias": biases.alibi(4)},
    "lse": {"outputs": ("output", "lse")},
}
SHAPES = [("B", "S"), ("B", "L"), (2, "L")]
"""The batch, and the length of the keys."""
LENGTHS = [dict(zip("BLS", lengths, strict=True)) for lengths in ((0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("release", REDUCED)
def test_no_length_of_0_ends_the_process(release: str, tmp_path: Path) -> None:
    graphs, shapes = graphs_and_shapes(release)
    results = run_graphs(release, graphs, tmp_path)
    died = {name: result for name, result in results.items() if isinstance(result, str) and "process" in result}
    assert died == {}
    ran = {name: result[0]["output"] for name, result in results.items() if not isinstance(result, str)}
    for name, output in ran.items():
        *shape, keys = shapes[name]
        assert output.shape == tuple(shape), name
        assert keys or not output.any(), name
    for form in ("tiled", "primitive"):
        assert f"{form}, all pairs, B S, B=2 L=0 S=5" in ran


def graphs_and_shapes(release: str) -> tuple[dict[str, Graph], dict[str, tuple[int, ...]]]:
    """By name, each graph that is not refused, with the shape of its output and the number of its keys."""
    graphs, shapes = {}, {}
    for form, (rule, said), (batch, keys) in product(FORMS, RULES.items(), SHAPES):
        query, key = (TensorSpec("float32", (batch, 4, length, 16)) for length in ("L", keys))
        try:
            model = export_attention(query, key, key, **said, form=form, runtime=runtime_of(release))
        except ValueError:  # the form is refused, or the rule is for other names
            continue
        for lengths in LENGTHS:
            values = " ".join(f"{name}={length}" for name, length in lengths.items())
            name = f"{form}, {rule}, {batch} {keys}, {values}"
            graphs[name] = model, [ones(model, lengths)]
            entries = lengths[batch] if isinstance(batch, str) else batch
            shapes[name] = entries, 4, lengths["L"], 16, lengths[keys]
    return graphs, shapes


def ones(model: onnx.ModelProto, lengths: dict[str, int]) -> dict[str, np.ndarray]:
    """1 in each input; a length has its number, or one of `lengths`."""
    feeds = {}
    for graph_input in model.graph.input:
        tensor = graph_input.type.tensor_type
        shape = [lengths[axis.dim_param] if axis.dim_param else axis.dim_value for axis in tensor.shape.dim]
        feeds[graph_input.name] = np.ones(shape, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return feeds
