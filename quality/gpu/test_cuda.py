"""Exported graphs on CUDA. quality/gpu/run.py runs them, beside all else that needs a GPU."""

from __future__ import annotations

import pytest
from feature_calls import features
from internals import Runtime, providers, to_json

from sdpa_xp_export import TensorSpec, export_attention, verify
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import FORMS, unsupported_reason

pytest.importorskip("onnxruntime")
CUDA = "CUDAExecutionProvider" in providers()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not CUDA, reason="onnxruntime starts no CUDA provider here")]


TARGET = Runtime.parse("test", "onnxruntime>=1.28;cuda")
HEAVY = {"MatMul", "Softmax", "Loop", "Attention", "MultiHeadAttention", "GroupQueryAttention", "TensorScatter"}


def stated(dtype: str, form: str) -> list[str]:
    """The calls that the form takes and that a model can state in its metadata."""
    return [
        name
        for name, call in features(dtype).items()
        if "from_function" not in to_json(call)
        and (form == "auto" or unsupported_reason(form, call, TARGET) is None)
    ]


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_each_form_agrees_where_it_was_sent(dtype: str, form: str) -> None:
    """Every call of the list of features, its numbers on the device and its products there too."""
    for name in stated(dtype, form):
        model = export_call(features(dtype)[name], form=form, runtime=str(TARGET))
        report = verify(model, provider="cuda")
        assert report.agrees, (name, report.worst)
        assert report.math_mode == "no TF32"
        assert {placed.op for placed in report.fell_back} & HEAVY == set(), name


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_attention_is_placed_on_cuda(dtype: str, is_causal: bool) -> None:
    qkv = TensorSpec(dtype, ("B", 8, "L", 64))
    model = export_attention(qkv, qkv, qkv, is_causal=is_causal, runtime=str(TARGET))
    placed = {node.provider for node in verify(model, provider="cuda").placements if node.op == "Attention"}
    assert placed == {"CUDAExecutionProvider"}
