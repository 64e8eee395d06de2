"""The search for false alarms draws calls of every kind, and tells a model that `verify` calls wrong."""

from __future__ import annotations

from functools import wraps
from typing import Any

import onnx
import pytest
from edits import changed_output
from internals import DEFAULT_RUNTIME, ExportCall, Runtime, checked_call
from short_runs import run_each_model_once

from quality.faults import false_alarms
from quality.faults.false_alarms import alarm, alarm_of_layer, functions_of, main, random_calls, right_models
from quality.faults.right_layers import LAYERS
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LAYERS)
def test_right_layers_give_no_alarm_and_wrong_ones_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run_each_model_once(monkeypatch)
    assert alarm_of_layer(name, 0) is None
    export = false_alarms.to_onnx
    layer, _ = LAYERS[name]

    @wraps(layer)
    def wrong(*arguments: Any, **keywords: Any) -> Any:
        return layer(*arguments, **keywords) * 1.01

    monkeypatch.setattr(false_alarms, "to_onnx", lambda _, spec: export(wrong, spec))
    assert "DISAGREES" in str(alarm_of_layer(name, 0))


def test_each_model_has_its_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verified: list[object] = []
    monkeypatch.setattr(false_alarms, "listed_calls", lambda: iter([("plain", small())]))
    monkeypatch.setattr(false_alarms, "alarm", lambda right, *_, **__: verified.append(right[2]))
    monkeypatch.setattr(false_alarms, "alarm_of_layer", lambda name, seed: verified.append((name, seed)))
    for part in ("1/2", "2/2"):
        assert main(["--random", "0", "--layers", "2", "--part", part]) == 0
    forms = {"attention", "multi_head", "tiled", "primitive"}
    assert {*verified} == forms | {(name, seed) for name in LAYERS for seed in (0, 1)}
    assert len(verified) == 4 + 2 * len(LAYERS)
    assert "0 false alarms in 25 of 25 models" in capsys.readouterr().out


def test_a_mask_of_a_function_is_told_to_verify() -> None:
    call = small(
        attn_mask=masks.padding(TensorSpec("int64", (1,))) & masks.from_function(lambda b, h, i, j: i + j != 2)
    )
    assert functions_of(small(is_causal=True)) == {}
    padding, _ = functions_of(call)["attn_mask"].parts
    assert padding.arguments["key_lengths"] == TensorSpec("int64", (1,))
    assert alarm(("function", call, "primitive"), DEFAULT_RUNTIME) is None
