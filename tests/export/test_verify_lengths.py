"""`verify` runs a model at lengths where each number in its masks and biases matters."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention, verify

QKV = TensorSpec("float32", (1, 2, "L", 8))
PAST = TensorSpec("float32", (1, 2, "P", 8))
TABLE = TensorSpec("float32", (32, 2))


def stated_otherwise(model: onnx.ModelProto, other: onnx.ModelProto) -> onnx.ModelProto:
    """The graph of a model with the call of another."""
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model)
    del wrong.metadata_props[:]
    wrong.metadata_props.extend(other.metadata_props)
    return wrong


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"attn_mask": masks.sliding_window(40, 0)}, {"attn_mask": masks.sliding_window(41, 0)}),
        ({"attn_mask": masks.sliding_window(None, 40)}, {"attn_mask": masks.sliding_window(None, 41)}),
        ({"attn_mask": masks.sliding_window(3, 40)}, {"attn_mask": masks.sliding_window(3, 41)}),
        ({"attn_mask": masks.causal(30)}, {"attn_mask": masks.causal(31)}),
        ({"attn_mask": masks.causal(-30)}, {"attn_mask": masks.causal(-31)}),
        ({"attn_mask": masks.chunked(30)}, {"attn_mask": masks.chunked(31)}),
        ({"attn_mask": masks.dilated(30)}, {"attn_mask": masks.dilated(31)}),
        ({"attn_mask": masks.prefix(30)}, {"attn_mask": masks.prefix(31)}),
        ({"attn_mask": ~masks.chunked(30)}, {"attn_mask": ~masks.chunked(31)}),
        (
            {"attn_mask": masks.causal() | masks.prefix(30)},
            {"attn_mask": masks.causal() | masks.prefix(31)},
        ),
        (
            {"bias": biases.relative(TABLE, max_distance=60)},
            {"bias": biases.relative(TABLE, max_distance=61)},
        ),
        (
            {"attn_mask": masks.sliding_window(40, 0), "past_key": PAST, "past_value": PAST},
            {"attn_mask": masks.sliding_window(41, 0), "past_key": PAST, "past_value": PAST},
        ),
    ],
)
def test_a_number_that_is_off_by_one_is_seen(one: dict[str, Any], other: dict[str, Any]) -> None:
    models = [export_attention(QKV, QKV, QKV, **rules) for rules in (one, other)]
    assert all(verify(model).agrees for model in models)
    for model, stated in (models, models[::-1]):
        assert not verify(stated_otherwise(model, stated)).agrees


def test_lengths_follow_from_the_numbers() -> None:
    """As many as heads and windows leave room for; slopes are no lengths."""

    def lengths(**rules: Any) -> list[str]:
        runs = verify(export_attention(QKV, QKV, QKV, **rules, form="primitive")).runs
        return [run.inputs for run in runs if "large" not in run.inputs]

    plain = ["L=2", "L=5", "L=1"]
    assert lengths() == lengths(is_causal=True) == lengths(bias=biases.alibi(2)) == plain
    assert lengths(attn_mask=masks.sliding_window(40, 20)) == [*plain, "L=43"]
    assert lengths(attn_mask=masks.sliding_window(2**20, 0)) == plain
    fixed = TensorSpec("float32", (1, 2, 6, 8))
    model = export_attention(fixed, fixed, fixed, masks.sliding_window(3, 0))
    assert {run.inputs for run in verify(model).runs} == {"fixed", "fixed, large scores"}
