"""A picture of numbers that fall, such as a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdpa_xp.plot.panels import THEMES, paint


def falling(values: Sequence[float], *, across: str, up: str, theme: str) -> Any:
    """One line, on a logarithmic scale."""
    from matplotlib.figure import Figure

    colours = THEMES[theme]
    figure = Figure(figsize=(5.2, 2.8), layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.plot(values, color=colours.full)
    axes.set(yscale="log", xlabel=across, ylabel=up)
    paint(axes, colours)
    return figure
