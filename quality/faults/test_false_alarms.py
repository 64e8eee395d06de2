"""The search for false alarms draws calls of every kind, and tells a model that `verify` calls wrong."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from edits import changed_output
from internals import DEFAULT_RUNTIME, ExportCall, Runtime, checked_call

from quality.faults import false_alarms
from quality.faults.false_alarms import alarm, functions_of, random_calls, right_models
from sdpa_xp import masks
from sdpa_xp_export import TensorSpec


def small(**rules: Any) -> ExportCall:
    qkv = TensorSpec("float32", (1, 1, 3, 8))
    return checked_call("test", qkv, qkv, qkv, **rules)


def test_random_calls_are_of_every_kind() -> None:
    calls = [call for _, call in random_calls(40, 0)]
    assert len(calls) > 20
    assert {call.cached for call in calls} == {False, True}
    assert {call.query.dtype for call in calls} == set(false_alarms.DTYPES)
    assert any(call.masks for call in calls)
    assert any(call.biases for call in calls)
    models = list(right_models(iter([("plain", small())]), Runtime.parse("test", DEFAULT_RUNTIME)))
    assert [form for _, _, form in models] == ["attention", "multi_head", "tiled", "primitive"]


def test_a_right_model_gives_no_alarm_and_a_wrong_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    right = "plain", small(), "primitive"
    assert alarm(right, DEFAULT_RUNTIME) is None
    export = false_alarms.export_call

    def wrong(*arguments: Any, **options: Any) -> onnx.ModelProto:
        model = export(*arguments, **options)
        changed_output("Mul", 1.5)(model)
        return model

    monkeypatch.setattr(false_alarms, "export_call", wrong)
    assert str(alarm(right, DEFAULT_RUNTIME)).startswith("plain, primitive: primitive: DISAGREES")


def test_a_mask_of_a_function_is_told_to_verify() -> None:
    call = small(
        attn_mask=masks.padding(TensorSpec("int64", (1,))) & masks.from_function(lambda b, h, i, j: i + j != 2)
    )
    assert functions_of(small(is_causal=True)) == {}
    padding, _ = functions_of(call)["attn_mask"].parts
    assert padding.arguments["key_lengths"] == TensorSpec("int64", (1,))
    assert alarm(("function", call, "primitive"), DEFAULT_RUNTIME) is None
