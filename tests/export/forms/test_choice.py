"""What an export chooses where the caller says nothing: the form by the size of a call, and the opset."""

from __future__ import annotations

import re
from typing import Any

import internals
import onnx
import pytest
from internals import FEW_QUERIES, FEW_SCORES, TARGETS, VERY_MANY_SCORES, Graph, graph_namespace, metadata_of
from short_runs import assert_right

from sdpa_xp import biases, masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx
from sdpa_xp_export.lowering.formula import both_allow


def specs(batch: Any, heads: int, queries: Any, keys: Any) -> list[TensorSpec]:
    shared = TensorSpec("float32", (batch, heads, keys, 16))
    return [TensorSpec("float32", (batch, heads, queries, 16)), shared, shared]


def reason(model: onnx.ModelProto) -> str:
    return metadata_of(model)["sdpa_xp.reason"]


FEW, VERY_MANY = FEW_SCORES["unmasked"], VERY_MANY_SCORES


@pytest.mark.parametrize(
    ("sizes", "size"),
    [
        ((1, 1, 32, FEW // 32), "few"),
        ((1, 1, FEW // 16, 16), "few"),
        ((2, 4, 32, FEW // 256), "few"),
        ((1, 1, 32, FEW // 32 + 1), "many"),
        ((1, 1, FEW // 16 + 1, 16), "many"),
        ((2, 1, 32, FEW // 32), "many"),
        ((1, 2, 32, FEW // 32), "many"),
        ((1, 1, 32, VERY_MANY // 32), "many"),
        ((1, 1, VERY_MANY // 16, 16), "many"),
        ((1, 1, 32, VERY_MANY // 32 + 1), "very many"),
        ((1, 1, VERY_MANY // 16 + 1, 16), "very many"),
    ],
)
def test_how_many_scores(sizes: Any, size: str) -> None:
    """Of all heads and batch entries together."""
    assert reason(export_attention(*specs(*sizes))).startswith(f"all pairs, {size} scores: the best on cpu")


@pytest.mark.parametrize("sizes", [("B", 1, 20, 2), (1, 1, "L", 2), (1, 1, 20, "S")])
def test_a_length_that_is_not_known_counts_as_many_scores(sizes: Any) -> None:
    model = export_attention(*specs(*sizes))
    where = "above 17 million scores, timed with AVX-512 (below: attention)"
    assert reason(model).startswith(f"all pairs, open lengths: the best on cpu {where}; not multi_head")
    assert metadata_of(model)["sdpa_xp.form"] == "tiled"


PAST = {name: TensorSpec("float32", (2, 4, 7, 16)) for name in ("past_key", "past_value")}
LENGTHS = TensorSpec("int64", (2,))


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        ({}, "all pairs"),
        ({"is_causal": True}, "causal"),
        ({"attn_mask": masks.causal()}, "causal"),
        ({"attn_mask": masks.causal(1)}, "masked"),
        ({"attn_mask": masks.sliding_window(1, 0)}, "masked"),
        ({"attn_mask": masks.padding([3, 4]), "is_causal": True}, "masked"),
        ({"bias": TensorSpec("float32", (20, 20))}, "all pairs with a bias"),
        ({"bias": biases.alibi(4), "is_causal": True}, "causal with a bias"),
        (PAST, "all pairs with a cache"),
        (PAST | {"is_causal": True}, "causal with a cache"),
        (PAST | {"attn_mask": masks.sliding_window(1, 0)}, "masked with a cache"),
        (
            PAST | {"past_lengths": LENGTHS, "bias": biases.alibi(4)},
            "all pairs with a cache with free space and a bias",
        ),
    ],
)
def test_what_masks_a_call(rules: dict[str, Any], kind: str) -> None:
    place = "expected to be the best on cpu, but not measured for a prompt with a cache"
    place = place if "past_key" in rules else "the best on cpu"
    assert reason(export_attention(*specs(2, 4, 20, 20), **rules)).startswith(f"{kind}, few scores: {place}")


OPEN_PAST = {name: TensorSpec("float32", (2, 4, "P", 16)) for name in PAST}


@pytest.mark.parametrize(
    ("rules", "kind", "form"),
    [
        ({}, "all pairs", "attention"),
        (OPEN_PAST, "all pairs with a cache", "attention"),
        (OPEN_PAST | {"is_causal": True}, "causal with a cache", "attention"),
        (OPEN_PAST | {"attn_mask": masks.sliding_window(1, 0)}, "masked with a cache", "primitive"),
        (OPEN_PAST | {"past_lengths": LENGTHS}, "all pairs with a cache with free space", "primitive"),
        ({"attn_mask": masks.padding(LENGTHS)}, "masked", "primitive"),
    ],
)
@pytest.mark.parametrize(("queries", "is_few"), [(1, True), (FEW_QUERIES, True), (FEW_QUERIES + 1, False)])
def test_few_queries_have_no_loop(
    rules: dict[str, Any], kind: str, form: str, queries: int, is_few: bool
) -> None:
    """A step of decoding has few scores for each key, also if the number of keys is not known."""
    keys = queries if "past_key" in rules else "S"
    model = export_attention(*specs(2, 4, queries, keys), **rules)
    assert reason(model).startswith(f"{kind}, few queries: the best on cpu") is is_few
    assert ("Loop" in {node.op_type for node in model.graph.node}) is not is_few
    if is_few:
        assert metadata_of(model)["sdpa_xp.form"] == form


@pytest.mark.parametrize(
    ("provider", "what"),
    [
        ("cuda", "but no graph was run there"),
        *((provider, "but its time was not measured there") for provider in ("wasm", "webgpu", "web")),
    ],
)
def test_what_was_not_measured_is_an_expectation(provider: str, what: str) -> None:
    runtime = f"onnxruntime>=1.28;{provider}"
    why = f": expected to be the best on {provider}, {what}"
    for rules in ({}, PAST):
        assert why in reason(export_attention(*specs(2, 4, 6, 6), **rules, runtime=runtime))
    model = to_onnx(lambda x: scaled_dot_product_attention(x, x, x), specs(2, 4, 6, 6)[0], runtime=runtime)
    assert why in metadata_of(model)["sdpa_xp.forms"]


@pytest.mark.parametrize("past", [PAST, PAST | {"past_lengths": LENGTHS}])
@pytest.mark.parametrize("provider", TARGETS)
def test_a_cache_says_why_it_is_not_the_usual_operator(provider: str, past: dict[str, Any]) -> None:
    """GroupQueryAttention, which decoders are often written with."""
    why = reason(export_attention(*specs(2, 4, 6, 6), **past, runtime=f"onnxruntime>=1.28;{provider}"))
    is_wrong = provider in ("webgpu", "web")
    words = "computes GroupQueryAttention wrong" if is_wrong else "GroupQueryAttention without its cache"
    assert why.count("; not grouped_query: ") == 1
    assert words in why
    assert "grouped_query" not in reason(export_attention(*specs(2, 4, 6, 6)))


@pytest.mark.parametrize(
    ("batch", "options", "ends"),
    [
        (2, {"is_causal": True}, ("for 1 to 67", "below: attention, above: grouped_query")),
        ("B", {"is_causal": True}, ("above 1", "below: attention")),  # it takes no empty batch
        (2, {"is_causal": True, "opset": 18}, ("up to 67", "above: grouped_query")),
        ("B", {"is_causal": True, "opset": 18}, None),
        ("B", {"attn_mask": masks.sliding_window(5, 0)}, ("above 2.1", "below: primitive")),
        (2, {"runtime": "onnxruntime>=1.31;cpu"}, ("above 17", "below: attention")),
    ],
)
def test_open_lengths_say_for_how_many_scores_the_form_is_the_best(
    batch: int | str, options: dict[str, Any], ends: tuple[str, str] | None
) -> None:
    where = f" {ends[0]} million scores, timed with AVX-512 ({ends[1]})" if ends else ""
    model = export_attention(*specs(batch, 4, "L", "L"), **options)
    kind = "causal" if "is_causal" in options else "masked" if "attn_mask" in options else "all pairs"
    assert reason(model) == f"{kind}, open lengths: the best on cpu{where}"
    for other, scores in ((where.partition("below: ")[2], 1e4), (where.partition("above: ")[2], 1e8)):
        if other:  # and a call that is known to have so many scores gets that form
            length = int((scores / 8) ** 0.5)
            sized = export_attention(*specs(2, 4, length, length), **options)
            assert metadata_of(sized)["sdpa_xp.form"] == re.match(r"\w+", other)[0]


@pytest.mark.parametrize(("batch", "is_named"), [("B", True), (2, False)])
def test_grouped_causal_heads_say_why_they_are_not_the_usual_operator(batch: int | str, is_named: bool) -> None:
    query, key = TensorSpec("float32", (batch, 8, "L", 64)), TensorSpec("float32", (batch, 2, "L", 64))
    why = reason(export_attention(query, key, key, is_causal=True))
    assert why.startswith("causal, open lengths: the best on cpu")
    words = "not grouped_query: GroupQueryAttention takes no empty batch, so the batch must be"
    assert (words in why) is is_named


def opset(model: onnx.ModelProto) -> int:
    (version,) = (entry.version for entry in model.opset_import if not entry.domain)
    return int(version)


LENGTHS = masks.padding(TensorSpec("int64", (2,)))


@pytest.mark.parametrize("form", ["tiled", "primitive"])
@pytest.mark.parametrize("rules", [{}, {"attn_mask": LENGTHS}, {"is_causal": True}])
def test_opset_of_forms_of_old_operators(form: str, rules: dict[str, Any]) -> None:
    assert opset(export_attention(*specs(2, 4, 6, 6), **rules, form=form)) == 18


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ({}, 23),
        ({"is_causal": True}, 23),
        ({"attn_mask": LENGTHS}, 24),
        ({"attn_mask": LENGTHS, "is_causal": True}, 23),
        ({"attn_mask": LENGTHS, "bias": TensorSpec("float32", (6, 6))}, 23),
        ({"attn_mask": masks.padding([3, 4], [2, 6])}, 23),
        ({"attn_mask": masks.padding(3)}, 23),
        ({"attn_mask": masks.prefix([3, 4])}, 23),
    ],
)
def test_opset_of_attention(rules: dict[str, Any], wanted: int) -> None:
    """24 has lengths of keys, for which nothing else may mask or be added."""
    assert opset(export_attention(*specs(2, 4, 6, 6), **rules, form="attention")) == wanted


def test_opset_of_attention_of_three_axes() -> None:
    x = TensorSpec("float32", (4, 6, 16))
    model = export_attention(x, x, x, masks.padding(3), form="attention")
    assert opset(model) == 23
    assert_right(model)


@pytest.mark.parametrize(("runtime", "wanted"), [("onnxruntime>=1.28;cpu", 24), ("onnxruntime>=1.27;cpu", 18)])
def test_opset_of_a_layer(runtime: str, wanted: int) -> None:
    x = TensorSpec("float32", (2, 4, 6, 16))
    assert opset(to_onnx(lambda x: scaled_dot_product_attention(x, x, x), x, runtime=runtime)) == wanted


def test_pairs_that_both_let_attend() -> None:
    """No node for what is known while the graph is written."""
    runtime = internals.Runtime.parse("test", "onnx")
    settings = {"opset": 18, "runtime": runtime, "namespace": graph_namespace}
    graph = Graph(internals.GraphSettings(**settings))
    one, other = (graph.input(name, "bool", (2, 3)) for name in "ab")
    for known in (True, False, one):
        assert both_allow(True, known) is both_allow(known, True) is known
        assert both_allow(False, known) is both_allow(known, False) is False
    assert not graph.written.nodes
    assert both_allow(one, other).name == graph.written.nodes[0].output[0]
    assert graph.written.nodes[0].op_type == "And"


def test_a_spec_of_a_list_is_that_of_a_tuple() -> None:
    one, other = TensorSpec("float32", ["B", 2]), TensorSpec("float32", ("B", 2))
    assert one == other
    assert hash(one) == hash(other)
    assert one.shape == ("B", 2)
