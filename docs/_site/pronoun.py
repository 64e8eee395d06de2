"""One head of a real sentence encoder, in which "it" attends to the noun that it stands for."""

from __future__ import annotations

import minilm
import numpy as np

SENTENCE = "The animal did not cross the street because it was too tired."
LAYER, HEAD = 3, 1  # both counted from 0


def attention_map() -> tuple[list[str], np.ndarray]:
    """Return the tokens and their attention weights, (tokens, tokens)."""
    ids, mask = minilm.tokenized([SENTENCE])
    weights = minilm.load().maps(ids, mask, LAYER)
    return minilm.words([SENTENCE])[0], np.asarray(weights)[0, HEAD]
