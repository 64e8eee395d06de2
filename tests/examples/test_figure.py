"""The picture of the demo: a panel for each sentence, in which one head attends."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from internals import HEAD, LAYER, Activations, AttentionInputs, AttentionMap, attention_maps, draw


def activations() -> Activations:
    """Two sentences of 5 and 4 tokens, in as many layers and heads as the picture asks for."""
    tokens = [["[CLS]", "the", "bank", "flows", "[SEP]"], ["[CLS]", "bank", "pays", "[SEP]", "[PAD]"]]
    mask = np.asarray([[True] * 5, [True] * 4 + [False]])[:, None, None, :]
    rng = np.random.default_rng(0)
    layers = [
        AttentionInputs(*(rng.standard_normal((2, HEAD + 1, 5, 8)).astype(np.float32) for _ in range(3)))
        for _ in range(LAYER + 1)
    ]
    return Activations(tokens, mask, layers)


def test_a_panel_for_each_sentence() -> None:
    maps = attention_maps(activations())
    figure = draw(maps)
    *panels, _bar = figure.axes
    tokens = [["[CLS]", "the", "bank", "flows", "[SEP]"], ["[CLS]", "bank", "pays", "[SEP]"]]
    assert [[label.get_text() for label in axes.get_xticklabels()] for axes in panels] == tokens
    assert [[label.get_text() for label in axes.get_yticklabels()] for axes in panels] == tokens
    for axes, attention_map in zip(panels, maps, strict=True):
        (image,) = axes.get_images()
        np.testing.assert_array_equal(image.get_array(), attention_map.weights)
        np.testing.assert_allclose(attention_map.weights.sum(axis=1), 1, atol=1e-6)
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")


def test_the_token_that_a_word_attends_to_most() -> None:
    weights = np.asarray([[0.2, 0.8], [0.9, 0.1]], np.float32)
    token, weight = AttentionMap(["it", "cup"], weights).most_attended("it")
    assert (token, weight) == ("cup", pytest.approx(0.8))
