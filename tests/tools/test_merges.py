"""Exported models that are merged as they are: each pair of forms, and three models in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx.utils
import pytest
from internals import FormName, exported_models, metadata_of, runtime_notes, stated_runtimes
from short_runs import agreed
from tools.models import Arrays, drawn, run
from tools.results import assert_equal

from sdpa_xp import masks, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, export_attention, to_onnx, verify, verify_layer
from sdpa_xp_export.forms.choice import FORMS

HEADS = TensorSpec("float32", (2, 4, 150, 8))
OPEN = TensorSpec("float32", ("B", 4, "L", 8))
OPSET = 23


def call(form: FormName, scale: float) -> onnx.ModelProto:
    causal = form != "multi_head"
    return export_attention(HEADS, HEADS, HEADS, form=form, opset=OPSET, scale=scale, is_causal=causal)


def layer(_: str, scale: float) -> onnx.ModelProto:
    def attend(query: Any) -> Any:
        mask = masks.sliding_window(40, 0)
        return query - scaled_dot_product_attention(query, query, query, attn_mask=mask, scale=scale)

    return to_onnx(attend, HEADS, opset=OPSET)


EXPORTS: dict[str, Callable[[Any, float], onnx.ModelProto]] = dict.fromkeys(FORMS, call) | {"to_onnx": layer}


@cache
def exported(kind: str, scale: float) -> tuple[onnx.ModelProto, Arrays, np.ndarray]:
    """A model, inputs, and its output."""
    model = EXPORTS[kind](kind, scale)
    feeds = drawn(model, {"P": 2, "S": 2})
    return model, feeds, run(model, feeds)[0]


def prefixed(prefix: str, feeds: Arrays) -> Arrays:
    return {prefix + name: array for name, array in feeds.items()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("one", "other"), [*product(EXPORTS, EXPORTS)])
def test_every_pair_of_forms(one: str, other: str) -> None:
    """One after the other, and side by side; the second can be cut out again."""
    first, first_feeds, between = exported(one, 0.3)
    second, second_feeds, alone = exported(other, 0.7)
    into = "query" if other == "to_onnx" else ("query", "key", "value")[[*EXPORTS].index(one) % 3]
    names = {"prefix1": "a/", "prefix2": "b/"}
    feeds = prefixed("a/", first_feeds) | prefixed("b/", second_feeds)
    chained = onnx.compose.merge_models(first, second, io_map=[("output", into)], **names)
    onnx.checker.check_model(chained, full_check=True)
    right = run(second, second_feeds | {into: between})
    assert_equal(run(chained, feeds), right)
    inputs = [f"b/{value.name}" for value in second.graph.input if value.name != into]
    cut = onnx.utils.Extractor(chained).extract_model(["a/output", *inputs], ["b/output"])
    assert_equal(run(cut, feeds | {"a/output": between}), right)
    beside = onnx.compose.merge_models(first, second, io_map=[], **names)
    assert_equal(run(beside, feeds), [between, alone])
    assert len(exported_models(chained)) == len(exported_models(beside)) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("start", range(len(EXPORTS)))
def test_three_models_in_turn(start: int) -> None:
    kinds = [[*EXPORTS][(start + step) % len(EXPORTS)] for step in range(3)]
    parts = [exported(kind, scale) for kind, scale in zip(kinds, (0.3, 0.7, 0.5), strict=True)]
    merged = onnx.compose.add_prefix(parts[0][0], "0/")
    right, feeds = parts[0][2], prefixed("0/", parts[0][1])
    for step, (model, inputs, _) in enumerate(parts[1:], 1):
        edge = [(merged.graph.output[0].name, "query")]
        merged = onnx.compose.merge_models(merged, model, io_map=edge, prefix2=f"{step}/")
        (right,) = run(model, inputs | {"query": right})
        feeds |= prefixed(f"{step}/", inputs)
    assert_equal(run(merged, feeds), [right])
    assert len(exported_models(merged)) == 3


@pytest.mark.parametrize("opset", range(17, 25))
def test_the_same_opset_is_all_that_a_merge_needs(opset: int) -> None:
    model = to_onnx(lambda x: scaled_dot_product_attention(x, x, x), HEADS, opset=opset, form="primitive")
    for form in (form for form, record in FORMS.items() if opset in record.opsets):
        other = export_attention(HEADS, HEADS, HEADS, form=form, opset=opset, is_causal=form != "multi_head")
        onnx.compose.merge_models(model, other, io_map=[("output", "key")], prefix1="a/", prefix2="b/")


@pytest.mark.parametrize("kind", EXPORTS)
def test_keys_follow_from_what_is_exported(kind: str) -> None:
    """The same export gives the same bytes, and another has other keys."""
    again, model = (EXPORTS[kind](kind, 0.3).SerializeToString(deterministic=True) for _ in range(2))
    assert again == model
    keys = [{entry.key for entry in exported(kind, scale)[0].metadata_props} for scale in (0.3, 0.7)]
    assert not keys[0] & keys[1]


def merged_calls(*runtimes: str, older: bool = False) -> onnx.ModelProto:
    """Causal attention several times, each with a runtime of its own: its output is the next one's query."""
    models = [
        export_attention(OPEN, OPEN, OPEN, is_causal=True, opset=OPSET, form="tiled", runtime=runtime)
        for runtime in runtimes
    ]
    if older:
        for entry in models[0].metadata_props:
            entry.key = entry.key.rpartition(".")[0]
    named = [onnx.compose.add_prefix(model, f"{'abc'[n]}_") for n, model in enumerate(models)]
    return reduce(
        lambda one, other: onnx.compose.merge_models(
            one, other, io_map=[(one.graph.output[0].name, other.graph.input[0].name)]
        ),
        named,
    )


CPU = "CPUExecutionProvider"
RUNTIMES = "onnxruntime>=1.23;cpu", "onnxruntime>=1.30;cpu", "onnxruntime>=1.28;cuda"


@pytest.mark.parametrize("older", [False, True])
def test_verify_says_that_models_were_merged(older: bool) -> None:
    merged = merged_calls(*RUNTIMES, older=older)
    words = r"^verify: `model` must be one exported model, but several .* were merged; got models=3\. .*`call`"
    with pytest.raises(ValueError, match=words):
        verify(merged)
    assert [str(runtime) for runtime in stated_runtimes(exported_models(merged))] == [*RUNTIMES[1:]]


def test_each_runtime_of_merged_models_is_judged() -> None:
    """Releases of two programs are not compared; two providers of one release are two runtimes."""
    openvino, newer = "openvino>=2026.4;cpu", "onnxruntime>=1.32;cpu"
    runtimes = stated_runtimes(exported_models(merged_calls(openvino, newer)))
    unsure = "results are not promised"
    another = f"a part of the file is for {newer}, and not for OpenVINO: {unsure}"
    assert runtime_notes(runtimes, "2026.4.1", ["OpenVINO"], "openvino") == (another,)
    another = f"a part of the file is for {openvino}, and not for onnxruntime: {unsure}"
    older = f"onnxruntime 1.31.1 is older than a part of the file's {newer}: {unsure}"
    assert runtime_notes(runtimes, "1.31.1", [CPU]) == (another, older)
    runtimes = stated_runtimes(exported_models(merged_calls(RUNTIMES[2], "onnxruntime>=1.28;cpu", "onnx")))
    other = f"a part of the file is for {RUNTIMES[2]}: results on {CPU} are not {unsure.split()[-1]}"
    assert runtime_notes(runtimes, "1.31.1", [CPU]) == (other,)


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("is_causal", [True, False])
def test_verify_layer_takes_merged_models(is_causal: bool) -> None:
    def whole(a_query: Any, a_key: Any, a_value: Any, b_key: Any, b_value: Any) -> Any:
        between = scaled_dot_product_attention(a_query, a_key, a_value, is_causal=True)
        return {"b_output": scaled_dot_product_attention(between, b_key, b_value, is_causal=is_causal)}

    report = verify_layer(merged_calls(*RUNTIMES[:2]), whole)
    assert report.agrees is is_causal
    assert (report.form, report.runtime) == ("tiled", RUNTIMES[1])


@pytest.mark.usefixtures("short_verify")
def test_a_file_of_an_older_exporter_is_read() -> None:
    """Its keys have no digest."""
    model = export_attention(OPEN, OPEN, OPEN, is_causal=True, form="tiled", runtime=RUNTIMES[0])
    right = metadata_of(model)
    for entry in model.metadata_props:
        entry.key = entry.key.rpartition(".")[0]
    assert {entry.key: entry.value for entry in model.metadata_props} == metadata_of(model) == right
    report = agreed(verify(model))
    assert (report.form, report.runtime) == ("tiled", RUNTIMES[0])
