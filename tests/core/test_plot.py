"""The picture of a mask: what is in it, not how it looks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sdpa_xp import masks, plot


def test_a_mask_is_drawn_as_it_is() -> None:
    mask = masks.causal() & masks.sliding_window(2, 0)
    figure = plot.mask(mask, (5, 7))
    (axes,) = figure.axes
    drawn = np.asarray(axes.images[0].get_array(), bool)
    np.testing.assert_array_equal(drawn, masks.to_array(mask, (5, 7)))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert axes.get_title() == "causal() & sliding_window(left=2, right=0)"


def test_a_panel_for_each_batch_entry_and_head() -> None:
    lengths = masks.padding([1, 2, 3])
    figure = plot.mask(lengths, (3, 2, 4, 4))
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["0, 0", "0, 1", "1, 0", "1, 1", "2, 0", "2, 1"]
    for axes, length in zip(shown, [1, 1, 2, 2, 3, 3], strict=True):
        assert np.asarray(axes.images[0].get_array()).sum() == 4 * length


def test_refused() -> None:
    with pytest.raises(TypeError, match="`mask` must be a mask; got mask="):
        plot.mask(np.ones((2, 2), bool), (2, 2))


def test_nothing_is_shown_or_kept() -> None:
    """pyplot, which keeps figures and picks a window system, is not imported."""
    code = (
        "import sys; from sdpa_xp import masks, plot; assert 'matplotlib' not in sys.modules;"
        "plot.mask(masks.causal(), (3, 3)); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
