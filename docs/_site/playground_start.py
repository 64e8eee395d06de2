"""A reader's own sentence in the playground: the encoder from token ids to what enters the layer that is shown.

A browser must load the weights, so they are stored in fewer bits: the embeddings of words in 8, the matrices in
16. The graph is written by `to_onnx`, and computes in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import array_api_compat
import minilm
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from playground_encoder import LAYER, SENTENCES, Layer, encoder, parameters, referring

from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

NAME = "encoder-start.onnx"
WEIGHTS = "encoder-start.bin"
VOCABULARY = "vocabulary.txt"
"""The files of the site. assets/playground/encoder.js reads them."""
MOST_TOKENS = 64
"""Tokens of a sentence; assets/playground/texts.js cuts longer ones."""
LARGE = 1000
"""Bytes, from which the weights of a node are in the file of weights."""
WORDS = "embeddings.word_embeddings.weight"
SCALES = "embeddings.word_embeddings.scale"
"""The name of the largest number of each word's vector divided by 127."""


ODD = (
    "",
    "naïve café, 3.14 [MASK] e-mail!",
    "ΟΔΟΣ İstanbul straße 漢字 한국 😀 ﬁne",
    f"{'x' * 101} a\u200db",
    "It never ends, " * 30,
)
"""Sentences that try the tokenizer."""


@dataclass(frozen=True)
class Start(minilm.MiniLM):
    """The encoder before the layer that is shown, with its weights in fewer bits."""

    def __call__(self, ids: Any) -> Any:
        """Token ids (L,) -> the vectors that enter the layer (L, 384)."""
        xp = array_api_compat.array_namespace(ids)
        x = self.embedded(xp.reshape(ids, (1, -1)))
        for layer in range(LAYER):
            x = self.encoded(x, None, f"encoder.layer.{layer}")
        return x[0, ...]

    def embedded(self, ids: Any) -> Any:
        """Add the embeddings of each token, its position and the first segment."""
        xp = array_api_compat.array_namespace(ids)
        positions = xp.arange(ids.shape[1], device=array_api_compat.device(ids))
        rest = self.parameters["embeddings.position_embeddings.weight"]
        scales = self.parameters[SCALES]
        rows = xp.take(self.parameters[WORDS], ids[0, ...], axis=0)
        words = xp.astype(rows, scales.dtype) * xp.take(scales, ids[0, ...], axis=0)[:, None]
        return self.normalised((words + xp.take(rest, positions, axis=0))[None, ...], "embeddings.LayerNorm")


@cache
def start() -> Start:
    """Return the encoder, with the first segment added to the positions."""
    whole = encoder().parameters
    segment, positions = (whole[f"embeddings.{name}_embeddings.weight"] for name in ("token_type", "position"))
    scales = np.abs(whole[WORDS]).max(axis=1) / np.float32(127)
    kept: dict[str, NDArray[Any]] = {
        WORDS: np.round(whole[WORDS] / scales[:, None]).astype(np.int8),
        SCALES: scales,
        "embeddings.position_embeddings.weight": positions[:MOST_TOKENS] + segment[0],
    }
    parts = ("embeddings.LayerNorm.", *(f"encoder.layer.{layer}." for layer in range(LAYER)))
    for name, weight in whole.items():
        if name.startswith(parts):
            kept[name] = weight.astype(np.float16).astype(np.float32) if weight.ndim == 2 else weight
    return Start(kept)


@cache
def graph() -> onnx.ModelProto:
    """Return the graph, weights included."""
    return narrowed(to_onnx(start(), TensorSpec("int64", ("L",)), runtime="onnxruntime>=1.28;web"))


def narrowed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Store in 16 bits each matrix that these hold exactly; a node widens it, which a runtime does once."""
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) != 2:
            continue
        wide = numpy_helper.to_array(tensor)
        narrow = wide.astype(np.float16)
        if np.array_equal(narrow, wide):
            casts.append(
                onnx.helper.make_node("Cast", [f"{tensor.name}.16"], [tensor.name], to=tensor.data_type)
            )
            tensor.CopyFrom(numpy_helper.from_array(narrow, f"{tensor.name}.16"))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model, full_check=True)
    return model


def files() -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files: the graph, its weights, and the tokens that the encoder knows."""
    large = [tensor.name for tensor in graph().graph.initializer if len(tensor.raw_data) > LARGE]
    model, weights = referring(graph(), WEIGHTS, large)
    yield NAME, model.SerializeToString()
    yield WEIGHTS, weights
    yield VOCABULARY, "\n".join(vocabulary()).encode()


def vocabulary() -> list[str]:
    """Return the tokens, in the order of their ids."""
    ids = json.loads((minilm.folder() / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(ids, key=ids.get)


def verified() -> str:
    """Verify the graph; return sentences with the result, and how far a map is from that of all bits."""
    report = verify_layer(graph(), start(), draw={"ids": _ids_of_any_length})
    if not report.agrees:
        raise ValueError(f"{NAME}: {report}")
    return (
        f"`verify_layer` ran this graph {len(report.runs)} times when this site was built, and it agrees. "
        f"In the maps of the {len(SENTENCES)} sentences, fewer bits move a weight by at most "
        f"{largest_difference():.3f}."
    )


def largest_difference() -> float:
    """Return the largest difference of a weight in the sentences' maps from that of the whole encoder."""
    layer = Layer(parameters(), None, 0)
    scale = np.float32(1 / np.sqrt(32))
    differences = []
    for sentence in SENTENCES:
        ids, mask = minilm.tokenized([sentence.text])
        whole = layer(encoder().tokens(ids, mask, LAYER)[0], scale)["weights"]
        differences.append(np.abs(layer(start()(ids[0]), scale)["weights"] - whole).max())
    return float(max(differences))


def _ids_of_any_length(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
    return rng.integers(0, len(vocabulary()), shape)


def expected(sentence: str) -> dict[str, Any]:
    """Return the tokens of a sentence and the weights of the layer, for the check of the page in a browser."""
    split = minilm.tokenizer()
    split.no_padding()
    split.enable_truncation(MOST_TOKENS)
    encoding = split.encode(sentence)
    layer = Layer(parameters(), None, 0)
    weights = layer(start()(np.asarray(encoding.ids)), np.float32(1 / np.sqrt(32)))["weights"]
    return {"sentence": sentence, "tokens": encoding.tokens, "weights": weights.ravel().tolist()}


if __name__ == "__main__":  # `make docs-check` writes what it prints to a file
    print(json.dumps([expected(sentence) for sentence in (*(known.text for known in SENTENCES), *ODD)]))
