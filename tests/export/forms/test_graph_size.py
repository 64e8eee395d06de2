"""How large graphs are, in nodes: no more products than attention has, and no node that does nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx
import onnxruntime
import pytest
from edits import nodes
from feature_calls import features
from short_runs import assert_right

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx
from sdpa_xp_export.export import export_call

QUERY, ALL_CORES = TensorSpec("float32", ("B", 4, "L", 16)), TensorSpec("float32", ("B", 2, "S", 16))
FIXED = TensorSpec("float32", (2, 4, 6, 16))
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask of keys": {"attn_mask": TensorSpec("bool", ("B", 1, 1, "S"))},
    "mask of pairs": {"attn_mask": TensorSpec("bool", ("L", "S"))},
    "padding": {"attn_mask": masks.padding(TensorSpec("int64", ("B",)))},
    "window": {"attn_mask": masks.sliding_window(4, 0)},
    "documents": {"attn_mask": masks.document(*(TensorSpec("int64", ("B", n)) for n in "LS"))},
    "bias": {"bias": TensorSpec("float32", ("L", "S"))},
    "slopes": {"bias": biases.alibi(4)},
    "softcap": {"softcap": 2.0},
}
HIDING = ("mask of keys", "mask of pairs", "padding", "window", "documents", "bias")
"""Keys that no query attends are found by one product more."""
MOST = {
    "attention": (1, 4, 15, 7, 10, 20, 12, 12, 19, 1),
    "tiled": (70, 96, 84, 65, 106, 86, 71, 68, 64, 72),
    "primitive": (9, 24, 21, 21, 27, 34, 26, 24, 25, 11),
}
"""Nodes for each of the rules: to be lowered when there are fewer, not to be raised. In `tiled`, 25 cut
heads into parts, which take less time and memory."""
FUSED = {("multi_head", False): 9, ("multi_head", True): 9, ("grouped_query", True): 36}


def counted(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in nodes(model.graph))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", MOST)
def test_nodes(form: str, rule: str) -> None:
    count = counted(export_attention(QUERY, ALL_CORES, ALL_CORES, **RULES[rule], form=form))
    fused = form == "attention"
    assert count["Attention"] == fused
    assert count["Softmax"] == (not fused)
    assert count["MatMul"] == (0 if fused else 3 if rule in HIDING else 2)
    assert count["Loop"] == (form == "tiled")
    assert sum(count.values()) <= MOST[form][[*RULES].index(rule)], count


@pytest.mark.parametrize(("form", "causal"), FUSED)
def test_nodes_of_fused_operators(form: str, causal: bool) -> None:
    count = counted(export_attention(FIXED, FIXED, FIXED, is_causal=causal, form=form))
    assert sum(count.values()) <= FUSED[form, causal], count


@pytest.mark.parametrize(("length", "most"), [(512, 35), (4096, 46)])
def test_known_lengths_say_at_export_whether_heads_are_cut(length: int, most: int) -> None:
    specs = [TensorSpec("float32", (2, heads, length, 16)) for heads in (8, 4, 4)]
    assert sum(counted(export_attention(*specs, form="tiled")).values()) <= most


CACHED = {
    ("joined", "...HLE"): (1, 85, 26),
    ("joined", "...LHE"): (9, 89, 30),
    ("padded", "...HLE"): (14, 120, 46),
    ("padded", "...LHE"): (18, 124, 50),
}
"""Nodes of a causal call beside a cache, of each of the three forms."""


@pytest.mark.parametrize(("kind", "layout"), CACHED)
def test_nodes_beside_a_cache(kind: str, layout: str) -> None:
    def tokens(heads: int, length: str) -> TensorSpec:
        shape = (heads, length) if layout == "...HLE" else (length, heads)
        return TensorSpec("float32", ("B", *shape, 16))

    lengths = {"past_lengths": TensorSpec("int64", ("B",))} if kind == "padded" else {}
    cache = {"past_key": tokens(2, "P"), "past_value": tokens(2, "P")} | lengths
    specs = [tokens(heads, "L") for heads in (4, 2, 2)]
    for form, most in zip(MOST, CACHED[kind, layout], strict=True):
        count = counted(export_attention(*specs, **cache, is_causal=True, layout=layout, form=form))
        assert sum(count.values()) <= most, (form, count)


@pytest.mark.parametrize("rule", ["plain", "causal", "window", "slopes", "softcap"])
def test_nodes_of_a_traced_function(rule: str) -> None:
    """A call in a layer is the graph that it is alone."""
    layer = to_onnx(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, **RULES[rule]),
        *(QUERY, ALL_CORES, ALL_CORES),
        form="tiled",
    )
    assert counted(layer) == counted(export_attention(QUERY, ALL_CORES, ALL_CORES, **RULES[rule], form="tiled"))


def test_a_graph_does_not_grow_with_its_lengths() -> None:
    for form in ("tiled", "primitive", "attention"):
        short, long = (
            counted(
                export_attention(*[TensorSpec("float32", (1, 2, length, 8))] * 3, is_causal=True, form=form)
            )
            for length in (10_000, 100_000)
        )
        assert short == long


def test_each_node_is_used() -> None:
    for form in ("attention", "primitive"):
        for rules in RULES.values():
            graph = export_attention(QUERY, ALL_CORES, ALL_CORES, **rules, form=form).graph
            read = {name for node in nodes(graph) for name in node.input} | {
                graph_output.name for graph_output in graph.output
            }
            read |= {
                graph_output.name for node in graph.node for a in node.attribute for graph_output in a.g.output
            }
            unread = [node.op_type for node in nodes(graph) if not read & set(node.output)]
            assert not unread
            assert {tensor.name for tensor in graph.initializer} <= read


@pytest.mark.parametrize(
    "name",
    [
        "softcap, causal",
        "mask: padding and causal",
        "mask: causal, lower right",
        "bias: function of the scores",
        "cache, window",
        "padded cache, causal, grouped heads",
    ],
)
@pytest.mark.parametrize("form", ["primitive", "tiled"])
def test_onnxruntime_warns_of_nothing(form: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """As of a body that captures both a Cast and its input, or has a constant that it does not use."""
    model = export_call(features("float16")[name], form=form)
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert capfd.readouterr().err == ""


def test_a_length_may_have_any_name() -> None:
    """Also a name of the forms for the keys that they keep."""
    query, key = (TensorSpec("float32", ("B", 2, length, 8)) for length in ("rows", "kept_keys"))
    mask = masks.padding(TensorSpec("int64", ("B",))) & masks.causal("lower_right")
    assert_right(export_attention(query, key, key, mask, form="tiled"))
