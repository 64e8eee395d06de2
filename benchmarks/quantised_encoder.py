"""Errors of caches of 4 bits on a real model's keys: `python benchmarks/quantised_encoder.py` prints a table.

The keys and values are those of all-MiniLM-L6-v2 (examples/minilm.py says what it needs) for the first 512
tokens of what Python's `help("class")` prints. An error is the root mean square of the change of the
attention's output, over that of the output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray
from tables import table

from sdpa_xp import KVCache, scaled_dot_product_attention

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import minilm

TOKENS, GROUP, LEVELS = 512, 32, 15
Floats = NDArray[np.float32]


def heads() -> list[tuple[Floats, Floats, Floats]]:
    """Return query, key and value (1, 12, 512, 32) of each layer."""
    from tokenizers import Tokenizer

    tokenizer_file = next(path for path in Path(str(files(minilm.FOLDER))).rglob("tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = np.asarray([tokenizer.encode(topics["class"]).ids[:TOKENS]])
    model, mask = minilm.load(np.asarray), np.ones(ids.shape, bool)
    projections = []
    for layer in range(minilm.LAYERS):
        x = model.tokens(ids, mask, layer)
        names = (f"encoder.layer.{layer}.attention.self.{name}" for name in ("query", "key", "value"))
        projections.append(tuple(model.heads(x, name) for name in names))
    return projections


def per(axis: str) -> Callable[..., Floats]:
    """Return attention to a cache of this library in int4, with keys scaled per token or per channel."""

    def attend(query: Floats, key: Floats, value: Floats) -> Floats:
        return KVCache(key, value).quantised("int4", per=axis).attend(query, is_causal=False)

    return attend


def rotated(query: Floats, key: Floats, value: Floats) -> Floats:
    """Rotate queries and keys by a Hadamard matrix, which spreads a channel (QuaRot, arXiv 2404.00456)."""
    rotation = np.ones((1, 1), np.float32)
    while len(rotation) < query.shape[-1]:
        rotation = np.block([[rotation, rotation], [rotation, -rotation]]) * np.float32(0.5**0.5)
    return per("token")(query @ rotation, key @ rotation, value)


def kivi(query: Floats, key: Floats, value: Floats) -> Floats:
    """Round keys along channels and values along tokens, in groups (arXiv 2402.02750, section 3)."""
    return scaled_dot_product_attention(query, grouped(key, -2), grouped(value, -1))


def grouped(x: Floats, axis: int) -> Floats:
    """Return x in 16 levels between the least and the largest of each GROUP numbers along an axis."""
    x = np.moveaxis(x, axis, -1)
    parts = x.reshape(*x.shape[:-1], -1, GROUP)
    least, largest = parts.min(axis=-1, keepdims=True), parts.max(axis=-1, keepdims=True)
    step = (largest - least) / LEVELS
    rounded = np.rint((parts - least) / step) * step + least
    return np.moveaxis(rounded.reshape(x.shape), -1, axis)


WAYS = {
    'int4, per="token"': per("token"),
    'int4, per="channel"': per("channel"),
    "a Hadamard rotation, then per token": rotated,
    "KIVI: groups of 32, asymmetric": kivi,
}


def main() -> None:
    layers = heads()
    rows = []
    for name, attend in WAYS.items():
        errors = []
        for tokens in layers:
            exact = scaled_dot_product_attention(*tokens)
            errors.append(float(np.sqrt(np.mean((attend(*tokens) - exact) ** 2) / np.mean(exact**2))))
        rows.append([name, *(f"{error:.1%}" for error in errors)])
    print(*table(["", *(f"layer {n}" for n in range(1, len(layers) + 1))], rows), sep="\n")


if __name__ == "__main__":
    main()
