"""Real sentences for the playground: what enters a layer of a sentence encoder, and its graphs.

A graph has the projections and the attention of the layer, as `to_onnx` writes them. All graphs refer to one
file of weights, so a browser loads the weights once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import array_api_compat
import minilm
import numpy as np
import onnx
from internals import metadata_of
from numpy.typing import NDArray
from onnx.external_data_helper import set_external_data
from playground import MASKS, SOFTCAPS

from sdpa_xp import attention_weights
from sdpa_xp.masks import Mask
from sdpa_xp_export import TensorSpec, to_onnx, verify_layer

LAYER = 3
"""The layer that is shown, counted from 0: more of its heads show a clear pattern than in other layers."""
WIDTH = 384
"""The width of a token's vector."""
PREFIX = f"encoder.layer.{LAYER}.attention.self."
WEIGHTS = "encoder.bin"
"""The file that the graphs refer to."""
PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True)
class Sentence:
    """A sentence, and a head in which something can be seen."""

    name: str
    """The name in links."""
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
        weights = attention_weights(query, key, attn_mask=self.mask, scale=scale, softcap=self.softcap)
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
    """Return the weights of the layer, in the order of their file."""
    weights = encoder().parameters
    names = [f"{name}.{part}" for name in PROJECTIONS for part in ("weight", "bias")]
    return {name: weights[PREFIX + name] for name in names}


def name_of(mask: str, softcap: int) -> str:
    """Return the file name of a graph. assets/playground/texts.js builds the same name."""
    return f"{mask}-softcap{softcap}-encoder.onnx"


@cache
def layers() -> dict[str, tuple[Layer, onnx.ModelProto]]:
    """Return each layer with its graph, weights included, by file name."""
    layers_and_graphs = {}
    for mask, softcap in product(MASKS, SOFTCAPS):
        layer = Layer(parameters(), MASKS[mask], softcap)
        inputs = (TensorSpec("float32", ("L", WIDTH)), TensorSpec("float32", ()))
        layers_and_graphs[name_of(mask, softcap)] = (
            layer,
            to_onnx(layer, *inputs, runtime="onnxruntime>=1.28;web"),
        )
    return layers_and_graphs


def files() -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files: graphs, their weights, and the layer's input for each sentence."""
    for name, (_, model) in layers().items():
        yield name, referring(model, WEIGHTS, parameters())[0].SerializeToString()
    yield WEIGHTS, b"".join(array.tobytes() for array in parameters().values())
    for sentence in SENTENCES:
        yield f"sentence-{sentence.name}.bin", entering(sentence.text)


def referring(model: onnx.ModelProto, file: str, names: Iterable[str]) -> tuple[onnx.ModelProto, bytes]:
    """Return a copy of a graph whose weights of these names are in a file, and the content of this file."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensors = {tensor.name: tensor for tensor in copy.graph.initializer}
    content = b""
    for name in names:
        data = tensors[name].raw_data
        set_external_data(tensors[name], file, len(content), len(data))
        tensors[name].ClearField("raw_data")
        content += data
    return copy, content


def entering(text: str) -> bytes:
    """Return the layer's input in float32, then query, key and value of all heads in float64, as bytes."""
    x = vectors(text)
    wide = Layer({name: array.astype(np.float64) for name, array in parameters().items()}, None, 0)
    heads = (wide.heads(x.astype(np.float64), name) for name in PROJECTIONS)
    return b"".join([x.tobytes(), *(np.ascontiguousarray(array).tobytes() for array in heads)])


def vectors(text: str) -> NDArray[np.float32]:
    """Return the vectors of a sentence's tokens before the layer, (L, 384)."""
    return np.ascontiguousarray(encoder().tokens(*minilm.tokenized([text]), LAYER)[0])


def verified() -> str:
    """Verify all graphs; return a sentence with the result. A graph that disagrees stops the build."""
    runs = 0
    for name, (layer, model) in layers().items():
        # One seed, so that a site is built as it was before.
        report = verify_layer(model, layer, draw={"x": _vectors_of_any_length}, seed=0)
        if not report.agrees:
            raise ValueError(f"{name}: {report}")
        runs += len(report.runs)
    return f"`verify_layer` ran {len(layers())} graphs {runs:,} times when this site was built. All agree."


def table() -> str:
    """Return an HTML table of masks: what the exporter chose, and a link to the graph of each softcap."""
    softcaps = "".join(f"<th>{f'softcap {softcap}' if softcap else 'no softcap'}</th>" for softcap in SOFTCAPS)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _row(mask))}</tr>" for mask in MASKS)
    heading = f"<tr><th>mask</th><th>form, opset</th>{softcaps}</tr>"
    return f"<table><thead>{heading}</thead><tbody>{rows}</tbody></table>"


def _row(mask: str) -> Iterator[str]:
    yield "none" if MASKS[mask] is None else f"<code>{MASKS[mask]}</code>"
    names = [name_of(mask, softcap) for softcap in SOFTCAPS]
    (form_and_opset,) = {_form_and_opset(layers()[name][1]) for name in names}
    yield form_and_opset
    for name in names:
        yield f'<a href="../assets/playground/{name}" download aria-label="{name}">encoder</a>'


def _form_and_opset(model: onnx.ModelProto) -> str:
    """Return the form and the opset that the model states in its metadata."""
    (attention,) = json.loads(metadata_of(model)["sdpa_xp.forms"])
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    return f"{attention['form']}, {opset}"


def _vectors_of_any_length(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draw vectors about as large as those of a sentence."""
    return rng.normal(0, 0.7, shape).astype(np.float32)
