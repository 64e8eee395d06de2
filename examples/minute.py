"""One word in two senses: a real encoder gives "minute" (time) a different vector than "minute" (tiny).

    token and position --> the same vector of "minute" in each sentence
                             |  six layers, each of which attends to the other words
                             v
                       a vector near to the vectors of the same sense

Run it: python examples/minute.py (the packages that it needs are named in minilm.py)
"""

from __future__ import annotations

from typing import Any

import minilm
import numpy as np

SENTENCES = [
    "We waited a minute for the bus.",
    "She paused a minute before she spoke.",
    "They found a minute crack in the glass.",
    "He saw a minute trace of gold.",
]
WORD, SENSES = "minute", ["time", "time", "tiny", "tiny"]
TELLING = ["waited", "paused", "crack", "trace"]
"""The words that tell the sense. In one head of the last layer, "minute" attends most to one of these."""
LAYER, HEAD = 5, 9


def main(xp: Any = np) -> None:
    """Run every step with the arrays of `xp`, a module such as numpy, torch or jax.numpy."""
    before, after = vectors(xp, layers=0), vectors(xp, layers=minilm.LAYERS)
    assert (before == before[0]).all()  # the same token at the same position in each sentence

    similarities = after @ after.T
    is_same_sense = np.asarray(SENSES)[:, None] == np.asarray(SENSES)
    assert similarities[is_same_sense].min() > similarities[~is_same_sense].max()
    print(f'Before the first layer "{WORD}" has the same vector in each sentence. After the last layer, the')
    print("cosine similarity of its vectors is high for the same meaning and lower for different ones:")
    for row, sense, sentence in zip(similarities, SENSES, SENTENCES, strict=True):
        print(" ".join(f"{similarity:.2f}" for similarity in row), f" {sense}  {sentence}")

    print(f'\nIn head {HEAD} of layer {LAYER} (both from 0), of all other words "{WORD}" attends most to')
    print("the one that shows its meaning. Only the mark [CLS] and the word itself may get more weight:")
    for (words, weights), telling in zip(maps(xp), TELLING, strict=True):
        row = weights[HEAD, words.index(WORD)]
        assert abs(row.sum() - 1) < 1e-5
        ranked = [words[i] for i in np.argsort(-row)]
        assert next(word for word in ranked if word not in (WORD, "[CLS]", "[SEP]")) == telling
        print("  ".join(f"{words[i]} {row[i]:.2f}" for i in np.argsort(-row)[:4]))


def vectors(xp: Any, layers: int) -> np.ndarray:
    """Return the vectors of the word after some layers, scaled to length 1: (sentences, 384)."""
    ids, mask = (xp.asarray(array) for array in minilm.tokenized(SENTENCES))
    x = np.asarray(minilm.load(xp.asarray).tokens(ids, mask, layers))
    word_vectors = np.stack([x[i, words.index(WORD)] for i, words in enumerate(minilm.words(SENTENCES))])
    return word_vectors / np.linalg.norm(word_vectors, axis=-1, keepdims=True)


def maps(xp: Any = np, layer: int = LAYER) -> list[tuple[list[str], np.ndarray]]:
    """Return the tokens of each sentence, and their attention weights: (heads, tokens, tokens).

    `sdpa_xp.plot.attention(weights, query_tokens=words, key_tokens=words)` draws them.
    """
    ids, mask = (xp.asarray(array) for array in minilm.tokenized(SENTENCES))
    weights = np.asarray(minilm.load(xp.asarray).maps(ids, mask, layer))
    tokens = minilm.words(SENTENCES)
    return [(words, weights[i, :, : len(words), : len(words)]) for i, words in enumerate(tokens)]


if __name__ == "__main__":
    main()
