"""Windows in opset 25: attributes of ai.onnx Attention, where the operator says what the mask says.

ONNX's evaluator runs them at short lengths, as it is slow; test_newest_opset.py has graphs in onnxruntime 1.32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from internals import metadata_of
from onnx import helper
from short_runs import assert_right

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx

NEWEST = "onnxruntime>=1.32;cpu"
WINDOW = masks.sliding_window(2, 1)
LENGTHS = TensorSpec("int64", ("B",))
CACHE = {f"past_{name}": TensorSpec("float32", ("B", 4, "P", 8)) for name in ("key", "value")}
PADDED = CACHE | {"past_lengths": LENGTHS}
X, Y = (TensorSpec("float32", ("B", 4, length, 8)) for length in "LS")


def exported(
    key: TensorSpec = X, *, form: str = "attention", runtime: str = NEWEST, **rules: Any
) -> onnx.ModelProto:
    query = TensorSpec(key.dtype, ("B", 4, "L", 8))
    return export_attention(query, key, key, form=form, opset=25, runtime=runtime, **rules)


def stated(model: onnx.ModelProto) -> tuple[int | None, int | None, bool]:
    """The window that the node states, and whether it is causal."""
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    left, right = (attributes.get(f"{side}_window_size") for side in ("left", "right"))
    return left, right, bool(attributes["is_causal"])


@pytest.mark.parametrize("cache", [{}, CACHE], ids=["self", "cache"])
@pytest.mark.parametrize(
    ("mask", "attributes"),
    [
        (masks.sliding_window(255, 0), (255, 0, False)),
        (masks.sliding_window(0, 0), (0, 0, False)),
        (WINDOW, (2, 1, False)),
        (masks.sliding_window(None, 1), (None, 1, False)),
        (masks.sliding_window(2, None), (2, None, False)),
        (masks.sliding_window(2, 2, offset=1), (1, 3, False)),
        (masks.sliding_window(2, 0, offset="lower_right"), (2, 0, False)),
        (masks.causal() & masks.sliding_window(2, None), (2, None, True)),
        (masks.sliding_window(2, 9) & masks.sliding_window(7, 1), (2, 1, False)),
        (masks.causal(3), (None, 3, False)),
        (masks.causal(), (None, None, True)),
    ],
    ids=str,
)
def test_a_window_is_one_node(mask: Any, attributes: Any, cache: dict[str, TensorSpec]) -> None:
    model = exported(attn_mask=mask, **cache)
    assert [node.op_type for node in model.graph.node] == ["Attention"]
    assert stated(model) == attributes
    assert_right(model, engine_name="reference")


@pytest.mark.parametrize(
    ("key", "rules", "attributes"),
    [
        (X, {"attn_mask": masks.sliding_window(1, 3, offset=2)}, (None, None, False)),
        (X, {"attn_mask": masks.sliding_window(2, 1, offset=LENGTHS)}, (None, None, False)),
        (X, {"attn_mask": ~WINDOW}, (None, None, False)),
        (Y, {"attn_mask": masks.sliding_window(2, 1, offset="lower_right")}, (None, None, False)),
        (X, {"attn_mask": WINDOW, "bias": biases.alibi(4)} | CACHE, (None, None, False)),
        (Y, {"attn_mask": WINDOW}, (2, 1, False)),
        (X, {"attn_mask": WINDOW & masks.padding(LENGTHS)}, (2, 1, False)),
        (X, {"attn_mask": WINDOW, "bias": TensorSpec("float32", ("L", "L")), "softcap": 4.0}, (2, 1, False)),
        (X, {"attn_mask": WINDOW, "is_causal": True} | PADDED, (2, 1, True)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_the_operator_does_not_say_is_its_mask(key: TensorSpec, rules: Any, attributes: Any) -> None:
    """A window without the query's own key, one for each batch entry, and a cache with more than windows."""
    model = exported(key, **rules)
    assert stated(model) == attributes
    assert_right(model, engine_name="reference")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32(dtype: str) -> None:
    """ONNX's function rounds the scores and the weights to the dtype of the node."""
    model = exported(TensorSpec(dtype, ("B", 4, "L", 8)), attn_mask=WINDOW)
    assert [node.op_type for node in model.graph.node] == ["Cast"] * 3 + ["Attention", "Cast"]
    assert_right(model, engine_name="reference")


def test_a_nan_in_a_key_that_no_window_holds_reaches_no_row() -> None:
    """With more keys than queries, those behind the last window; ONNX adds -inf to their scores."""
    evaluator = onnx.reference.ReferenceEvaluator(exported(Y, attn_mask=WINDOW))
    q, k = np.ones((1, 4, 3, 8), np.float32), np.ones((1, 4, 6, 8), np.float32)
    k[:, :, 4:] = np.nan
    (output,) = evaluator.run(None, {"query": q, "key": k, "value": k})
    np.testing.assert_allclose(output, q)


@pytest.mark.parametrize("length", [8, 300, 4096, "L"])
@pytest.mark.parametrize("rules", [{}, {"is_causal": True}, {"attn_mask": WINDOW}], ids=str)
@pytest.mark.parametrize("runtime", [NEWEST, "onnx"])
def test_auto_writes_no_attention_in_opset_25(rules: dict[str, Any], length: int | str, runtime: str) -> None:
    """onnxruntime 1.32 has no kernel for it: it runs ONNX's function, with all L x S scores in memory."""
    x = TensorSpec("float32", (1, 8, length, 64))
    forms = [
        metadata_of(export_attention(x, x, x, **rules, opset=opset, runtime=runtime))["sdpa_xp.form"]
        for opset in (25, None)
    ]
    assert forms[0] in ("tiled", "primitive", "multi_head", "grouped_query")
    if "attn_mask" in rules:
        assert forms == [forms[0]] * 2


def test_a_layer_has_the_node_too() -> None:
    def layer(x: Any) -> Any:
        return scaled_dot_product_attention(x * 2, x, x, masks.sliding_window(7, 0))

    model = to_onnx(layer, X, form="attention", opset=25, runtime=NEWEST)
    assert [node.op_type for node in model.graph.node] == ["Mul", "Attention"]
    assert stated(model) == (7, 0, False)


def test_without_the_opset_it_stays_a_mask() -> None:
    """The default is right in older releases too."""
    model = export_attention(X, X, X, WINDOW, form="attention", runtime=NEWEST)
    assert model.opset_import[0].version == 23
    assert stated(model) == (None, None, False)
