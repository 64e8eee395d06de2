"""The picture of the demo: one head, in which a pronoun attends to its noun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdpa_xp import attention_weights
from sdpa_xp_export._demo.encoder import Activations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYER, HEAD = 3, 1
"""Both counted from 0. In this head "it" attends to the noun that it stands for."""


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
