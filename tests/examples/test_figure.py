"""The picture of the demo: a panel for each sentence, a row for each layer, a column for each token."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from sdpa_xp_export._demo.encoder import Activations, AttentionInputs
from sdpa_xp_export._demo.picture import attention_of_word


def activations() -> Activations:
    """Two sentences of 5 and 4 tokens in three layers of two heads."""
    tokens = [["[CLS]", "the", "bank", "flows", "[SEP]"], ["[CLS]", "bank", "pays", "[SEP]", "[PAD]"]]
    mask = np.asarray([[True] * 5, [True] * 4 + [False]])[:, None, None, :]
    rng = np.random.default_rng(0)
    layers = [
        AttentionInputs(*(rng.standard_normal((2, 2, 5, 8)).astype(np.float32) for _ in range(3)))
        for _ in range(3)
    ]
    return Activations(tokens, mask, layers)


def test_a_panel_for_each_sentence() -> None:
    figure = attention_of_word(activations(), "bank")
    *panels, _bar = figure.axes
    wanted = [["[CLS]", "the", "bank", "flows", "[SEP]"], ["[CLS]", "bank", "pays", "[SEP]"]]
    assert [[each.get_text() for each in axes.get_xticklabels()] for axes in panels] == wanted
    for axes, tokens in zip(panels, wanted, strict=True):
        assert [each.get_text() for each in axes.get_yticklabels()] == ["layer 1", "layer 2", "layer 3"]
        assert axes.get_title() == f'"bank" in: {" ".join(tokens[1:-1])}'
        assert len(axes.texts) == 3 * len(tokens)
        rows = np.asarray([float(each.get_text()) for each in axes.texts]).reshape(3, len(tokens))
        np.testing.assert_allclose(rows.sum(axis=1), 1, atol=0.03)  # of numbers with two places
        (image,) = axes.get_images()
        np.testing.assert_allclose(image.get_array(), rows, atol=0.006)
        for each in axes.texts:
            column, row = each.get_position()
            assert each.get_text() == f"{image.get_array()[row, column]:.2f}"
            assert each.get_color() == ("black" if image.get_array()[row, column] > 0.25 else "white")
