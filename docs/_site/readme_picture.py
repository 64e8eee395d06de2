"""The picture at the top of the README: one real attention head, and the tiles that a window computes.

Write it again: PYTHONPATH=examples python docs/_site/readme_picture.py
It needs the extra `demo` and the encoder's weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pronoun
import tiling
from matplotlib.figure import Figure

from sdpa_xp import masks
from sdpa_xp.plot.panels import THEMES, paint

PICTURE = Path(__file__).parents[1] / "assets" / "readme.svg"
LENGTH = 4096
COLOURS = THEMES["light"]


def draw() -> Figure:
    """Two panels on a white background, which a dark page needs too."""
    from matplotlib.colors import LinearSegmentedColormap

    figure = Figure(figsize=(9.2, 4.1), layout="constrained", facecolor="white")
    head, tiles = figure.subplots(1, 2)
    words, weights = pronoun.attention_map()
    ramp = LinearSegmentedColormap.from_list("weights", COLOURS.ramp)
    head.imshow(weights, cmap=ramp, vmin=0)
    head.set_xticks(range(len(words)), words, rotation=90)
    head.set_yticks(range(len(words)), words)
    head.set(title='One head of a sentence encoder: "it" attends to "animal"')
    tiling.draw_panel(tiles, np.zeros((LENGTH, 64), np.float32), masks.sliding_window(1023, 0), COLOURS)
    tiles.set(title=f"masks.sliding_window(1023, 0), {LENGTH:,} tokens: tiles that are computed")
    for axes in (head, tiles):
        paint(axes, COLOURS)
    tiles.set_facecolor(COLOURS.empty)
    tiling.legend(figure, COLOURS)
    return figure


def write(path: Path) -> None:
    """Write an SVG with its own letters, the same bytes each time."""
    settings: dict[str, Any] = {"svg.fonttype": "path", "svg.hashsalt": "readme"}
    with matplotlib.rc_context(settings):
        draw().savefig(path, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    write(PICTURE)
