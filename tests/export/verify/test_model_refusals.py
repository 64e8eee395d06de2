"""Models that `verify` refuses before it runs them: a row a damage."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import onnx
import pytest

from sdpa_xp_export import TensorSpec, export_attention, verify

OPEN, FIXED = (TensorSpec("float32", (batch, 4, length, 16)) for batch, length in (("B", "L"), (2, 5)))


def of_input(damage: Callable[[Any], object]) -> Callable[[onnx.ModelProto], object]:
    """A damage to the type of the input `key`."""
    return lambda model: damage(model.graph.input[1].type.tensor_type)


def restated(old: str, new: str) -> Callable[[onnx.ModelProto], object]:
    """A damage to the call that the metadata state."""

    def damage(model: onnx.ModelProto) -> None:
        for entry in model.metadata_props:
            entry.value = entry.value.replace(old, new)

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda model: setattr(model.graph.node[0], "op_type", "NoSuchOp"), "onnxruntime must load `model`.*NoSuchOp"),
        (
            lambda model: setattr(model.graph.input[0], "name", "q"),
            r"must have the inputs of its call, by name, dtype and shape; got inputs=q: float32\[B,4,L,16\], "
            r"call=query: float32\[B,4,L,16\], missing=query, surplus=q\.",
        ),
        (of_input(lambda kind: setattr(kind, "elem_type", onnx.TensorProto.DOUBLE)), r"got inputs=key: float64\[B,4,L,16\], call=key: float32\[B,4,L,16\]\."),
        (of_input(lambda kind: setattr(kind.shape.dim[2], "dim_param", "S")), r"must have the inputs of its call.*got inputs=key: float32\[B,4,S,16\]"),
        (
            lambda model: setattr(model.graph.output[0].type.tensor_type, "elem_type", onnx.TensorProto.DOUBLE),
            "must have the outputs of its call.*got outputs=output: float64, call=output: float32",
        ),
        (restated("is_causal", "causal"), "must be one that export_attention wrote"),
        (restated('"scale": 0.25', '"scale": "alibi(8)"'), r"must be one that export_attention wrote \(`scale` must be readable"),
        (restated('"is_causal": false', '"is_causal": true'), "must contain the call and the numbers that export_attention wrote, but their digest"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_run(damage: Callable[[onnx.ModelProto], object], words: str) -> None:
    model = export_attention(OPEN, OPEN, OPEN)
    damage(model)
    with pytest.raises(ValueError, match=f"verify: .*{words}"):
        verify(model)


def other_order(model: onnx.ModelProto) -> None:
    inputs = [*model.graph.input]
    del model.graph.input[:]
    model.graph.input.extend([inputs[1], inputs[0], inputs[2]])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda model: model.graph.input[1].ClearField("type"), "got inputs=key: no type, call=key: float32[2,4,5,16]."),
        (of_input(lambda kind: kind.ClearField("shape")), "got inputs=key: float32, call=key: float32[2,4,5,16]."),
        (of_input(lambda kind: kind.shape.dim[2].Clear()), "got inputs=key: float32[2,4,?,16], call=key:"),
        (of_input(lambda kind: setattr(kind, "elem_type", onnx.TensorProto.STRING)), "got inputs=key: string[2,4,5,16], call=key:"),
        (of_input(lambda kind: setattr(kind, "elem_type", 99)), "got inputs=key: dtype 99 of ONNX[2,4,5,16], call=key:"),
        (lambda model: model.graph.input.pop(2), "got call=value: float32[2,4,5,16], missing=value."),
        (other_order, "got inputs=key: float32[2,4,5,16], query: float32[2,4,5,16], value: "),
    ],
)  # fmt: skip
def test_other_inputs_are_shown_as_specs(damage: Callable[[onnx.ModelProto], object], words: str) -> None:
    model = export_attention(FIXED, FIXED, FIXED)
    damage(model)
    with pytest.raises(ValueError, match=re.escape(words)):
        verify(model)
