"""What only a CUDA device can show. Run it by tests/gpu/run.py, beside the core tests on CuPy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from sdpa_xp_export import TensorSpec, agree, backends, export_attention, verify
from sdpa_xp_export.cases import calls

CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not CUDA, reason="onnxruntime has no CUDA provider here")]


@pytest.mark.parametrize("form", ["attention", "primitive"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", calls("float32"))
def test_exported_form_agrees(case: str, dtype: str, form: str) -> None:
    call = calls(dtype)[case]
    arguments: dict[str, Any] = {**call.inputs, **call.rules}
    model = export_attention(**arguments, form=form, runtime="onnxruntime>=1.28;cuda")
    report = verify(model, provider="cuda")
    assert report.agrees, report.worst


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_attention_is_placed_on_cuda(dtype: str, is_causal: bool) -> None:
    qkv = TensorSpec(dtype, ("B", 8, "L", 64))
    model = export_attention(qkv, qkv, qkv, is_causal=is_causal, runtime="onnxruntime>=1.28;cuda")
    placed = {node.provider for node in verify(model, provider="cuda").placements if node.op == "Attention"}
    assert placed == {"CUDAExecutionProvider"}


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_library_on_the_device_agrees(name: str) -> None:
    found = [backend for backend in backends.find([name]) if backend.device.startswith("cuda")]
    assert found
    for dtype in ("float16", "float32", "float64"):
        for row in agree.compare(agree.feature_jobs(dtype), dtype, found, []):
            assert row.agrees, row
            assert np.isfinite(row.worst.absolute)
