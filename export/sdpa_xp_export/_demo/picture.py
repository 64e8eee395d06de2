"""The picture of the demo: the words that one word attends, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdpa_xp import attention_weights
from sdpa_xp_export._demo.encoder import HEADS, Activations, AttentionInputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_of_word(activations: Activations, word: str) -> Figure:
    """Draw one panel a sentence: the weights from `word` to each token, one row a layer, mean over heads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(activations.tokens), squeeze=False)[0]
    image: Any = None
    for entry, (axes, tokens) in enumerate(zip(panels, activations.tokens, strict=True)):
        real = [token for token in tokens if token != "[PAD]"]
        row = tokens.index(word)
        maps = np.stack([_weights(layer, activations.mask)[entry, row] for layer in activations.layers])
        image = axes.imshow(maps[:, : len(real)], cmap="cividis", vmin=0, vmax=0.5, aspect="auto")
        for (layer, column), weight in np.ndenumerate(maps[:, : len(real)]):
            shade = "black" if weight > 0.25 else "white"
            axes.text(column, layer, f"{weight:.2f}", ha="center", va="center", color=shade, fontsize=8)
        axes.set_xticks(range(len(real)), real)
        axes.set_yticks(range(len(maps)), [f"layer {index + 1}" for index in range(len(maps))])
        axes.set_title(f'"{word}" in: {" ".join(real[1:-1])}', fontsize=10)
        axes.tick_params(length=0)
    figure.colorbar(image, ax=panels, label=f"weight, mean of {HEADS} heads", extend="max")
    return figure


def _weights(layer: AttentionInputs, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the mean weights over the heads, (batch, tokens, tokens)."""
    weights: NDArray[np.float32] = attention_weights(layer.query, layer.key, mask)
    return np.asarray(weights.mean(axis=1))
