"""What a graph for CUDA may not do: move integers in each step of a loop, or hold all scores.

`make cuda-placement` asks onnxruntime-gpu itself, without a GPU; here the rules are count of the graph alone.
"""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from feature_calls import DTYPES, features
from internals import Runtime, metadata_of
from standins.cuda.loops import copies_in_loops

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import unsupported_reason
from sdpa_xp_export.lowering.tile import GraphLengths, LengthsAsData, LengthsInBody

RUNTIME = "onnxruntime>=1.28;cuda"
LENGTHS = TensorSpec("int64", ("B",))


def spec(dtype: str, heads: int, length: int | str, width: int = 64, batch: int | str = "B") -> TensorSpec:
    return TensorSpec(dtype, (batch, heads, length, width))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_a_loop_moves_no_integer(dtype: str) -> None:
    """Each copy between host and device is a wait, once for each 128 queries."""
    target, count = Runtime.parse("test", RUNTIME), 0
    for name, call in features(dtype).items():
        if unsupported_reason("tiled", call, target) is None:
            assert copies_in_loops(export_call(call, form="tiled", runtime=RUNTIME).graph) == [], name
            count += 1
    assert count > 100


def test_layers_move_none_either() -> None:
    def layer(x: Any, lengths: Any) -> Any:
        return scaled_dot_product_attention(x, x, x, masks.padding(lengths) & masks.causal())

    model = to_onnx(layer, spec("float32", 8, "L"), LENGTHS, runtime=RUNTIME)
    assert [node.op_type for node in model.graph.node].count("Loop") == 1
    assert copies_in_loops(model.graph) == []


OFFSETS = masks.causal(LENGTHS)
CACHE = {"past_key": spec("float32", 8, "P"), "past_value": spec("float32", 8, "P"), "is_causal": True}


def tiled(length: int | str = "L", keys: int | str = "S", **rules: Any) -> onnx.ModelProto:
    query, key = spec("float32", 8, length), spec("float32", 8, keys)
    return export_attention(query, key, key, **rules, form="tiled", runtime=RUNTIME)


@pytest.mark.parametrize(
    ("owner", "name", "planted", "rules"),
    [
        # A length or a position is added to indices as it is, ...
        (LengthsAsData, "number", GraphLengths.number, {"attn_mask": masks.causal("lower_right")}),
        (LengthsAsData, "position", property(lambda lengths: lengths.host.position), CACHE | {"keys": "L"}),
        # ... or the body computes a bound of data, instead of the graph around it.
        (
            LengthsInBody,
            "extreme",
            lambda lengths, op, integers, **_: GraphLengths.extreme(lengths, op, lengths.graph.here(integers)),
            {"attn_mask": OFFSETS},
        ),
    ],
)
def test_what_a_step_moves_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, planted: Any, rules: dict[str, Any]
) -> None:
    assert copies_in_loops(tiled(**rules).graph) == []
    monkeypatch.setattr(owner, name, planted)
    assert copies_in_loops(tiled(**rules).graph) != []


def test_a_step_beside_a_cache_moves_no_offset() -> None:
    window = masks.sliding_window(3, 0, offset=LENGTHS)
    for rules in ({}, {"past_lengths": LENGTHS}):
        assert copies_in_loops(tiled(keys="L", **CACHE, **rules, attn_mask=window).graph) == []


def loop_of(model: onnx.ModelProto) -> onnx.NodeProto:
    (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
    return loop


def test_a_number_of_a_step_that_follows_from_constants_alone_is_found() -> None:
    """onnxruntime computes it on the device: it leaves only what follows from a Shape on the host."""
    model = tiled(256, is_causal=True)
    body = loop_of(model).attribute[0].g
    (one,) = (node for node in body.node if node.op_type == "Shape" and node.input[0] == body.input[2].name)
    constant = onnx.numpy_helper.from_array(
        onnx.numpy_helper.to_array(body.initializer[0]) * 0 + 1, one.output[0]
    )
    body.initializer.append(constant)
    body.node.remove(one)
    assert any("Iteration" in copy for copy in copies_in_loops(model.graph))


def test_a_loop_on_the_host_is_found() -> None:
    """A number of queries that is known, and an open number of keys: all inputs of the loop are on the host."""
    model = tiled(256, is_causal=True)
    model.graph.initializer.append(onnx.helper.make_tensor("count", onnx.TensorProto.INT64, [], [2]))
    loop_of(model).input[0] = "count"
    assert copies_in_loops(model.graph) == [f"{loop_of(model).name} runs on the host"]


# What CUDA's Attention takes without an array of L x S, as `make cuda-placement` sees it, and what not.
LINEAR: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "half, grouped heads": ("float16", 2, 64, 64, {"is_causal": True}),
    "half, wide": ("bfloat16", 2, 1024, 1024, {}),
    "half, E != Ev": ("float16", 8, 64, 32, {}),
    "float32": ("float32", 8, 64, 64, {"is_causal": True, "softcap": 5.0}),
    "float32, E != Ev": ("float32", 8, 64, 128, {}),
    "padding": ("float32", 8, 64, 64, {"attn_mask": masks.padding(LENGTHS)}),
}
QUADRATIC: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "float32, grouped heads": ("float32", 2, 64, 64, {"is_causal": True}),
    "half, grouped heads, E != Ev": ("float16", 2, 64, 32, {}),
    "a width of 20": ("float16", 8, 20, 20, {"is_causal": True}),
    "a value width of 36": ("bfloat16", 8, 64, 36, {}),
    "a width above 1,024": ("float32", 8, 1032, 1032, {}),
    "a window": ("float16", 8, 64, 64, {"attn_mask": masks.sliding_window(63, 0), "is_causal": True}),
    "a boolean mask": ("float32", 8, 64, 64, {"attn_mask": TensorSpec("bool", ("L", "L"))}),
    "keys of an array": ("float32", 8, 64, 64, {"attn_mask": TensorSpec("bool", ("B", 1, 1, "L"))}),
    "a bias": ("float16", 8, 64, 64, {"bias": TensorSpec("float16", (8, "L", "L"))}),
    "padding, causal": ("float32", 8, 64, 64, {"attn_mask": masks.padding(LENGTHS), "is_causal": True}),
}


@pytest.mark.parametrize("case", [*LINEAR, *QUADRATIC])
def test_auto_takes_no_form_whose_memory_is_quadratic(case: str) -> None:
    dtype, heads, width, value_width, rules = (LINEAR | QUADRATIC)[case]
    query, key, value = (
        spec(dtype, count, "L", size) for count, size in ((8, width), (heads, width), (heads, value_width))
    )
    said = metadata_of(export_attention(query, key, value, **rules, runtime=RUNTIME))
    assert said["sdpa_xp.form"] == ("attention" if case in LINEAR else "tiled")
    assert ("not attention: CUDA" in said["sdpa_xp.reason"]) == (case in QUADRATIC)
    # Known to be few, the scores fit into memory.
    few = [spec(dtype, part.shape[-3], 8, part.shape[-1], 2) for part in (query, key, value)]
    if not {"attn_mask", "bias"} & {*rules}:
        assert metadata_of(export_attention(*few, **rules, runtime=RUNTIME))["sdpa_xp.form"] == "attention"


def test_a_pinned_opset_has_no_lengths_of_keys() -> None:
    """At opset 23 padding is an L x S mask of the node."""
    qkv = [spec("float16", 8, "L")] * 3
    for opset, form in ((23, "tiled"), (24, "attention")):
        model = export_attention(*qkv, masks.padding(LENGTHS), opset=opset, runtime=RUNTIME)
        assert metadata_of(model)["sdpa_xp.form"] == form
