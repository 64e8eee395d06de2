"""Softmax saturation: why scores are divided by sqrt(E)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sdpa_xp import _checks as checks
from sdpa_xp._libraries.protocols import NumPyGenerator
from sdpa_xp.plot.drawing import need_matplotlib
from sdpa_xp.plot.panels import FONT, Theme, ThemeName, paint, theme_of
from sdpa_xp.weights import attention_scores, attention_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUNCTION = "plot.saturation"
DRAWS = 200
"""Queries that are drawn for each width, each with keys of its own."""


class Curve(NamedTuple):
    """What one scale gives, a number for each width."""

    label: str
    variances: list[float]
    largest: list[float]


def saturation(
    widths: Sequence[int] = (1, 4, 16, 64, 256, 1024),
    *,
    rng: NumPyGenerator,
    keys: int = 32,
    theme: ThemeName = "light",
) -> Figure:
    r"""Why scores are divided by $\sqrt{E}$: without it their spread grows with E, and one key takes all.

    Queries and keys are drawn from N(0, 1). The left panel has the variance of their scores, E without the
    scale and 1 with it; the right one the largest weight of a query, the mean of 200.

    Shapes:
        `E` width of a query or key, `S` keys.

    Args:
        widths: Each E to simulate.
        rng: A numpy.random.Generator.
        keys: S, at least 2.
        theme: "light" or "dark", the page that the picture is for.

    Returns:
        A figure of matplotlib.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: Widths or keys that are no integers, an `rng` that is no generator of NumPy.
        ValueError: A width below 1, or none; fewer than two keys.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import plot
        >>> figure = plot.saturation([4, 64], rng=np.random.default_rng(0))
        >>> [line.get_label() for line in figure.axes[1].lines][:2]
        ['without scale', 'scale 1/√E']

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.1, footnote 4.
    """
    need_matplotlib(FUNCTION)
    from matplotlib.figure import Figure

    colours = theme_of(FUNCTION, theme)
    widths = sorted(checks.lengths(FUNCTION, "widths", widths))
    keys = checks.integer(FUNCTION, "keys", keys, least=2)
    curves = _simulated(widths, keys, checks.simulation(FUNCTION, rng))

    figure = Figure(figsize=(8, 3.4), layout="constrained", facecolor="none")
    spread, largest = figure.subplots(1, 2)
    _lines(spread, widths, curves, [curve.variances for curve in curves], colours)
    _lines(largest, widths, curves, [curve.largest for curve in curves], colours)
    expected = {"linestyle": ":", "color": colours.ink, "linewidth": 1}
    spread.plot(widths, widths, label="expected, E and 1", **expected)
    spread.axhline(1, **expected)
    spread.set_yscale("log")
    spread.set_ylabel("variance of the scores")
    largest.axhline(1 / keys, label=f"all keys alike, 1/{keys}", **expected)
    largest.set_ylim(0, 1.05)
    largest.set_ylabel("largest weight of a query")
    for axes in (spread, largest):
        axes.legend(frameon=False, labelcolor=colours.ink, fontsize=FONT)
    return figure


def _simulated(widths: Sequence[int], keys: int, rng: Any) -> list[Curve]:
    curves = [Curve("without scale", [], []), Curve("scale 1/√E", [], [])]
    for width in widths:
        query, key = (rng.standard_normal((DRAWS, rows, width)) for rows in (1, keys))
        for curve, scale in zip(curves, (1.0, None), strict=True):
            curve.variances.append(float(attention_scores(query, key, scale=scale).var()))
            curve.largest.append(float(attention_weights(query, key, scale=scale).max(axis=-1).mean()))
    return curves


def _lines(
    axes: Any, widths: Sequence[int], curves: Sequence[Curve], values: Sequence[list[float]], theme: Theme
) -> None:
    styles = ((theme.other, "s--"), (theme.full, "o-"))
    for curve, numbers, (colour, style) in zip(curves, values, styles, strict=True):
        axes.plot(widths, numbers, style, color=colour, label=curve.label, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("width of queries and keys, E")
    paint(axes, theme)
