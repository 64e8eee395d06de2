"""A BERT and a GPT-2 in array-API code, with the weights of transformers' models: jit, save, engines, int8."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from internals import READERS
from short_runs import agreed

from sdpa_xp import KVCache, scaled_dot_product_attention
from sdpa_xp_export import TensorSpec, jit, save, to_onnx, verify_layer

pytestmark = [pytest.mark.usefixtures("short_verify"), pytest.mark.needs("torch", "transformers")]

LAYERS, HEADS, WIDTH, WORDS, POSITIONS = 2, 4, 32, 50, 40
IDS = np.random.default_rng(0).integers(0, WORDS, (2, 9))
MASK = np.arange(9) < np.asarray([[9], [6]])


@dataclass(frozen=True)
class Model:
    """What both models share: their weights by the names of the checkpoint, and the parts of a layer."""

    parameters: Mapping[str, np.ndarray]

    def norm(self, x: Any, name: str, eps: float) -> Any:
        xp = x.__array_namespace__()
        centred = x - xp.mean(x, axis=-1, keepdims=True)
        deviation = xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + eps)
        return centred / deviation * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def rows(self, name: str, ids: Any) -> Any:
        """ids (B, L) or (L,) -> rows of a table."""
        xp, table = ids.__array_namespace__(), self.parameters[f"{name}.weight"]
        return xp.reshape(xp.take(table, xp.reshape(ids, (-1,)), axis=0), (*ids.shape, table.shape[1]))


def split(x: Any) -> Any:
    """(B, L, heads * width) -> (B, heads, L, width)"""
    xp = x.__array_namespace__()
    return xp.permute_dims(xp.reshape(x, (*x.shape[:2], HEADS, WIDTH // HEADS)), (0, 2, 1, 3))


def join(x: Any) -> Any:
    """(B, heads, L, width) -> (B, L, heads * width)"""
    xp = x.__array_namespace__()
    merged = xp.permute_dims(x, (0, 2, 1, 3))
    return xp.reshape(merged, (*merged.shape[:2], WIDTH))


class Bert(Model):
    """Devlin et al., arXiv 1810.04805, section 3."""

    def __call__(self, ids: Any, mask: Any) -> Any:
        xp = ids.__array_namespace__()
        x = (
            self.rows("embeddings.word_embeddings", ids)
            + self.parameters["embeddings.token_type_embeddings.weight"][0]
        )
        x = x + self.rows("embeddings.position_embeddings", xp.arange(ids.shape[1]))
        x = self.norm(x, "embeddings.LayerNorm", 1e-12)
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            heads = (split(self.dense(x, f"{name}.attention.self.{p}")) for p in ("query", "key", "value"))
            attended = join(scaled_dot_product_attention(*heads, mask[:, None, None, :]))
            x = x + self.dense(attended, f"{name}.attention.output.dense")
            x = self.norm(x, f"{name}.attention.output.LayerNorm", 1e-12)
            inner = self.dense(x, f"{name}.intermediate.dense")
            inner = xp.maximum(inner, 0.0)  # NumPy has no erf: the model of transformers gets a ReLU, too
            x = self.norm(x + self.dense(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm", 1e-12)
        return x

    def dense(self, x: Any, name: str) -> Any:
        return x @ self.parameters[f"{name}.weight"].T + self.parameters[f"{name}.bias"]


class GPT2(Model):
    """Radford et al., 2019, with a cache; norms come before each part of a layer."""

    def __call__(self, ids: Any, past: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
        xp = ids.__array_namespace__()
        positions = xp.arange(ids.shape[1]) + xp.asarray(past[0][0].shape[2])
        x = self.rows("wte", ids) + self.rows("wpe", positions)
        present = {}
        for layer, pair in enumerate(past):
            name = f"h.{layer}"
            projected = self.dense(self.norm(x, f"{name}.ln_1", 1e-5), f"{name}.attn.c_attn")
            query, key, value = (split(projected[:, :, n * WIDTH : (n + 1) * WIDTH]) for n in range(3))
            cache = KVCache(*pair).append(key, value)
            x = x + self.dense(join(cache.attend(query)), f"{name}.attn.c_proj")
            inner = self.dense(self.norm(x, f"{name}.ln_2", 1e-5), f"{name}.mlp.c_fc")
            cubic = math.sqrt(2 / math.pi) * (inner + 0.044715 * inner * inner * inner)
            x = x + self.dense(0.5 * inner * (1.0 + xp.tanh(cubic)), f"{name}.mlp.c_proj")
            present |= {f"key_{layer}": cache.key, f"value_{layer}": cache.value}
        return {"hidden": self.norm(x, "ln_f", 1e-5), **present}

    def dense(self, x: Any, name: str) -> Any:
        return x @ self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]


def parameters(model: Any) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in model.state_dict().items() if x.is_floating_point()}


@pytest.fixture(scope="module")
def bert() -> tuple[Any, Any]:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH}
    config = BertConfig(
        vocab_size=WORDS, max_position_embeddings=POSITIONS, intermediate_size=64, hidden_act="relu", **sizes
    )
    theirs = BertModel(config, add_pooling_layer=False).eval()
    return theirs, Bert(parameters(theirs))


@pytest.fixture(scope="module")
def gpt2() -> tuple[Any, Any]:
    import torch
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=POSITIONS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)
    theirs = GPT2Model(config).eval()
    return theirs, GPT2(parameters(theirs))


def quantised(path: Path, folder: Path) -> Path:
    """The file with weights in int8, as onnxruntime's own quantiser writes it for a CPU of any kind."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_dynamic(path, folder / "int8.onnx", weight_type=QuantType.QInt8, reduce_range=True)
    assert (folder / "int8.onnx").stat().st_size < path.stat().st_size
    return folder / "int8.onnx"


def test_bert(bert: tuple[Any, Any], tmp_path: Path) -> None:
    import torch

    theirs, ours = bert
    fast = jit(ours, runtime="onnxruntime>=1.28;cpu")
    output = fast(IDS, MASK)
    with torch.no_grad():
        expected = theirs(torch.asarray(IDS), torch.asarray(MASK)).last_hidden_state.numpy()
    np.testing.assert_allclose(output[MASK], expected[MASK], atol=5e-6)
    assert fast(IDS[:, :4], MASK[:, :4]).shape == (2, 4, WIDTH)
    assert len(fast.models) == 1
    path = fast.save(tmp_path / "bert.onnx")
    assert verify_layer(path, ours, draw={"ids": words}).agrees
    session = onnxruntime.InferenceSession(quantised(path, tmp_path))
    (close,) = session.run(None, {"ids": IDS, "mask": MASK})
    assert np.abs(close - output)[MASK].max() < 0.1 < np.abs(output).max()


def words(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, WORDS, shape)


def test_gpt2(gpt2: tuple[Any, Any], tmp_path: Path) -> None:
    import torch

    theirs, ours = gpt2
    fast = jit(ours, verify=True)
    empty = np.zeros((2, HEADS, 0, WIDTH // HEADS), np.float32)
    past, outputs = [(empty, empty)] * LAYERS, []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 9)):
        result = fast(IDS[:, start:end], past)
        past = [(result[f"key_{n}"], result[f"value_{n}"]) for n in range(LAYERS)]
        outputs.append(result["hidden"])
    with torch.no_grad():
        expected = theirs(torch.asarray(IDS)).last_hidden_state.numpy()
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, atol=5e-6)
    path = fast.save(tmp_path / "gpt2.onnx")
    feeds = {"ids": IDS[:, :5]} | dict.fromkeys(("past", "past_1", "past_2", "past_3"), empty)
    session = onnxruntime.InferenceSession(path)
    assert {value.name for value in session.get_inputs()} == feeds.keys()
    np.testing.assert_array_equal(session.run(None, feeds)[0], outputs[0])
    close = onnxruntime.InferenceSession(quantised(path, tmp_path)).run(None, feeds)[0]
    assert np.abs(close - outputs[0]).max() < 0.1 < np.abs(outputs[0]).max()


@pytest.mark.parametrize(
    ("engine", "runtime"),
    [
        ("reference", "onnx"),
        pytest.param("openvino", "openvino>=2026.4;cpu", marks=pytest.mark.needs("openvino")),
    ],
)
def test_other_engines(engine: Any, runtime: str, bert: Any, gpt2: Any, tmp_path: Path) -> None:
    """Both models, and the BERT in int8; the evaluator has DequantizeLinear from opset 19 on."""
    ids = TensorSpec("int64", ("B", "L"))
    model = to_onnx(bert[1], ids, TensorSpec("bool", ("B", "L")), runtime=runtime, opset=21)
    agreed(verify_layer(model, bert[1], draw={"ids": words}, engine=engine))

    pair = (TensorSpec("float32", ("B", HEADS, "P", WIDTH // HEADS)),) * 2
    by_inputs = to_onnx(gpt2[1], ids, [pair] * LAYERS, runtime=runtime)
    layer = by_pasts(gpt2[1])
    agreed(verify_layer(by_inputs, layer, draw={"ids": words}, engine=engine))

    path, feeds = quantised(Path(save(model, tmp_path / "bert.onnx")), tmp_path), {"ids": IDS, "mask": MASK}
    (close,) = onnxruntime.InferenceSession(path).run(None, feeds)
    (same,) = READERS[engine](str(path), ["output"]).run(feeds).values()
    np.testing.assert_allclose(same[MASK], close[MASK], atol=0.005)  # that of int8 is 0.015


def by_pasts(layer: Any) -> Any:
    """The layer with an argument for each input of its graph."""

    def called(ids: Any, past: Any, past_1: Any, past_2: Any, past_3: Any) -> Any:
        return layer(ids, [(past, past_1), (past_2, past_3)])

    return called
