"""Softmax saturation: why scores are divided by sqrt(E)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sdpa_xp._checks.numbers import check_integer
from sdpa_xp._checks.plots import check_lengths, check_numpy_generator
from sdpa_xp._libraries.protocols import NumPyGenerator
from sdpa_xp.plot.panels import FONT, Theme, ThemeName, paint, theme_of
from sdpa_xp.plot.requirements import require_matplotlib
from sdpa_xp.weights import attention_scores, attention_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUNCTION = "plot.saturation"
DRAWS = 200
"""The number of random queries for each width; each query has its own random keys."""


class Curve(NamedTuple):
    """The results with one scale, one number for each width."""

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
    r"""Draw why scores are divided by $\sqrt{E}$: without this scale, one key gets almost all of the weight.

    Queries and keys are drawn from N(0, 1). The left panel shows the variance of their scores: it is E without
    the scale, and 1 with it. The right panel shows the largest weight of a query, averaged over 200 queries. It
    comes close to 1 for large E without the scale: the softmax saturates.

    Shapes:
        `E` width of a query or key, `S` keys.

    Args:
        widths: The widths E to simulate.
        rng: A numpy.random.Generator, which draws the queries and keys.
        keys: The number of keys S, at least 2.
        theme: "light" or "dark", for the page that shows the figure.

    Returns:
        A Matplotlib figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: A width or `keys` is not an integer, or `rng` is not a numpy.random.Generator.
        ValueError: A width is below 1, `widths` is empty, or `keys` is below 2.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import plot
        >>> figure = plot.saturation([4, 64], rng=np.random.default_rng(0))
        >>> [line.get_label() for line in figure.axes[1].lines][:2]
        ['without scale', 'scale 1/√E']

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.1, footnote 4.
    """
    require_matplotlib(FUNCTION)
    from sdpa_xp.plot.shown_figure import ShownFigure

    colours = theme_of(FUNCTION, theme)
    widths = sorted(check_lengths(FUNCTION, "widths", widths))
    keys = check_integer(FUNCTION, "keys", keys, least=2)
    curves = _simulate(widths, keys, check_numpy_generator(FUNCTION, rng))

    figure = ShownFigure((8, 3.4), colours.paper)
    variance, largest = figure.subplots(1, 2)
    _draw_lines(variance, widths, curves, [curve.variances for curve in curves], colours)
    _draw_lines(largest, widths, curves, [curve.largest for curve in curves], colours)
    expected = {"linestyle": ":", "color": colours.ink, "linewidth": 1}
    variance.plot(widths, widths, label="expected, E and 1", **expected)
    variance.axhline(1, **expected)
    variance.set_yscale("log")
    variance.set_ylabel("variance of the scores")
    largest.axhline(1 / keys, label=f"all keys alike, 1/{keys}", **expected)
    largest.set_ylim(0, 1.05)
    largest.set_ylabel("largest weight of a query")
    for axes in (variance, largest):
        axes.legend(frameon=False, labelcolor=colours.ink, fontsize=FONT)
    return figure


def _simulate(widths: Sequence[int], keys: int, rng: Any) -> list[Curve]:
    curves = [Curve("without scale", [], []), Curve("scale 1/√E", [], [])]
    for width in widths:
        query, key = (rng.standard_normal((DRAWS, rows, width)) for rows in (1, keys))
        for curve, scale in zip(curves, (1.0, None), strict=True):
            curve.variances.append(float(attention_scores(query, key, scale=scale).var()))
            curve.largest.append(float(attention_weights(query, key, scale=scale).max(axis=-1).mean()))
    return curves


def _draw_lines(
    axes: Any, widths: Sequence[int], curves: Sequence[Curve], values: Sequence[list[float]], theme: Theme
) -> None:
    styles = ((theme.contrast, "s--"), (theme.full, "o-"))
    for curve, numbers, (colour, style) in zip(curves, values, styles, strict=True):
        axes.plot(widths, numbers, style, color=colour, label=curve.label, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("width of queries and keys, E")
    paint(axes, theme)
