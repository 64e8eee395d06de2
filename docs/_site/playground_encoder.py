"""Real sentences for the playground: what enters a layer of a sentence encoder, and its graphs.

A graph has the projections and the attention of the layer, as `to_onnx` writes them. All graphs refer to one
file of weights, so a browser loads the weights once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import array_api_compat
import minilm
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.external_data_helper import set_external_data
from playground import MASKS, SOFTCAPS

from sdpa_xp import attention_weights
from sdpa_xp.masks import Mask
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

LAYER = 3
"""The layer that is shown, counted from 0: more of its heads can be read than of others."""
WIDTH = 384
"""Of the vector of a token."""
PREFIX = f"encoder.layer.{LAYER}.attention.self."
WEIGHTS = "encoder.bin"
"""The file that the graphs refer to."""
PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True)
class Sentence:
    """A sentence, and what is seen in one of its maps."""

    name: str
    """In links."""
    text: str
    head: int
    row: int
    """The token whose row is marked."""
    most: int
    """The token to which it attends most, without a mask."""
    note: str


SENTENCES = (
    Sentence(
        "pronoun",
        "The animal did not cross the street because it was too tired.",
        *(1, 9, 2),
        "Two nouns stand before “it”. Head 1 attends to the one that “it” means.",
    ),
    Sentence(
        "mistake",
        "The trophy did not fit in the suitcase because it was too small.",
        *(1, 10, 2),
        "A reader knows that the suitcase was too small. Head 1 still attends to the trophy.",
    ),
    Sentence(
        "subject",
        "The keys to the old cabinet are on the table.",
        *(1, 7, 2),
        "“cabinet” stands next to “are”. Head 1 attends to the subject, five words before.",
    ),
    Sentence(
        "article",
        "They found a minute crack in the glass.",
        *(1, 3, 5),
        "Head 1 attends from “a” to its noun, past “minute”, which means “tiny” here.",
    ),
    Sentence(
        "colour",
        "The red car stopped beside the blue house.",
        *(8, 7, 8),
        "Head 8 attends from “blue” to “house”, and from “house” back to “blue”.",
    ),
    Sentence(
        "repeated",
        "The cat saw the dog, and the dog saw the cat.",
        *(1, 11, 12),
        "“the” occurs four times. Head 1 attends from each of them to the noun behind it.",
    ),
    Sentence(
        "stop",
        "The teacher who helped the students was tired.",
        *(11, 7, 9),
        "Head 11 attends to the full stop from most words. It may do so when it has found nothing.",
    ),
    Sentence(
        "pieces",
        "Unbelievably, the snowboarders rediscovered the hut.",
        *(1, 5, 11),
        "The encoder cuts rare words into pieces. Head 1 attends from the end of “unbelievably” to the verb.",
    ),
    Sentence(
        "verb",
        "The man who sold the boat to my sister lives in Norway.",
        *(8, 11, 10),
        "Head 8 attends from “in” to the verb before it.",
    ),
)


@dataclass(frozen=True)
class Layer:
    """The self-attention of one layer of an encoder, without its last projection."""

    parameters: Mapping[str, Any]
    mask: Mask | None
    softcap: int

    def __call__(self, x: Any, scale: Any) -> dict[str, Any]:
        """The vectors of the tokens (L, 384) -> weights (heads, L, L) and output (heads, L, 32)."""
        query, key, value = (self.heads(x, name) for name in PROJECTIONS)
        weights = attention_weights(query, key, self.mask, scale=scale, softcap=self.softcap)
        return {"output": weights @ value, "weights": weights}

    def heads(self, x: Any, name: str) -> Any:
        """A projection, (L, 384) -> (heads, L, 32)."""
        xp = array_api_compat.array_namespace(x)
        projected = x @ self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]
        return xp.permute_dims(xp.reshape(projected, (x.shape[0], minilm.HEADS, -1)), (1, 0, 2))


@cache
def encoder() -> minilm.MiniLM:
    return minilm.load()


@cache
def parameters() -> dict[str, NDArray[np.float32]]:
    """The weights of the layer, in the order in which their file has them."""
    found = encoder().parameters
    names = [f"{name}.{part}" for name in PROJECTIONS for part in ("weight", "bias")]
    return {name: found[PREFIX + name] for name in names}


def name_of(mask: str, softcap: int) -> str:
    """The file of a graph, which assets/playground/texts.js puts together likewise."""
    return f"{mask}-softcap{softcap}-encoder.onnx"


@cache
def layers() -> dict[str, tuple[Layer, onnx.ModelProto]]:
    """By file, a layer and its graph, which has the weights within."""
    made = {}
    for mask, softcap in product(MASKS, SOFTCAPS):
        layer = Layer(parameters(), MASKS[mask], softcap)
        inputs = (TensorSpec("float32", ("L", WIDTH)), TensorSpec("float32", ()))
        made[name_of(mask, softcap)] = (
            layer,
            to_onnx(layer, *inputs, runtime="onnxruntime>=1.28;web"),
        )
    return made


def files() -> Iterator[tuple[str, bytes]]:
    """The graphs, their weights, and of each sentence what enters the layer."""
    for name, (_, model) in layers().items():
        yield name, referring(model).SerializeToString()
    yield WEIGHTS, b"".join(each.tobytes() for each in parameters().values())
    for sentence in SENTENCES:
        yield f"sentence-{sentence.name}.bin", entering(sentence.text)


def referring(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a graph that refers to the file of weights."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensors = {tensor.name: tensor for tensor in copy.graph.initializer}
    offset = 0
    for name, array in parameters().items():
        set_external_data(tensors[name], WEIGHTS, offset, array.nbytes)
        tensors[name].ClearField("raw_data")
        offset += array.nbytes
    return copy


def entering(text: str) -> bytes:
    """What enters the layer, in float32; and query, key and value of all heads, in float64."""
    x = vectors(text)
    wide = Layer({name: array.astype(np.float64) for name, array in parameters().items()}, None, 0)
    heads = (wide.heads(x.astype(np.float64), name) for name in PROJECTIONS)
    return b"".join([x.tobytes(), *(np.ascontiguousarray(each).tobytes() for each in heads)])


def vectors(text: str) -> NDArray[np.float32]:
    """The vectors of a sentence's tokens before the layer, (L, 384)."""
    return np.ascontiguousarray(encoder().tokens(*minilm.tokenized([text]), LAYER)[0])


def verified() -> str:
    """What `verify_layer` says of all graphs: one sentence; a graph that disagrees stops the build."""
    runs = 0
    for name, (layer, model) in layers().items():
        report = verify_layer(model, layer, draw={"x": _vectors_of_any_length})
        if not report.agrees:
            raise ValueError(f"{name}: {report}")
        runs += len(report.runs)
    return f"`verify_layer` ran {len(layers())} graphs {runs:,} times when this site was built. All agree."


def table() -> str:
    """HTML with a row a mask: what the exporter chose, and a link to the graph of each softcap."""
    softcaps = "".join(f"<th>{f'softcap {softcap}' if softcap else 'no softcap'}</th>" for softcap in SOFTCAPS)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _row(mask))}</tr>" for mask in MASKS)
    heading = f"<tr><th>mask</th><th>form, opset</th>{softcaps}</tr>"
    return f"<table><thead>{heading}</thead><tbody>{rows}</tbody></table>"


def _row(mask: str) -> Iterator[str]:
    yield "none" if MASKS[mask] is None else f"<code>{MASKS[mask]}</code>"
    names = [name_of(mask, softcap) for softcap in SOFTCAPS]
    (made,) = {_made(layers()[name][1]) for name in names}
    yield made
    for name in names:
        yield f'<a href="../assets/playground/{name}" download aria-label="{name}">encoder</a>'


def _made(model: onnx.ModelProto) -> str:
    """Form and opset, as the model itself states them."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    (attention,) = json.loads(metadata["sdpa_xp.forms"])
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    return f"{attention['form']}, {opset}"


def _vectors_of_any_length(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """As large as those of a sentence are."""
    return rng.normal(0, 0.7, shape).astype(np.float32)
