"""Curves: the variance of scores, and the memory of the scores."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._checks import shown
from .._checks.arrays import check_floating, check_plain_array
from .._checks.integers import check_some_integers
from .._checks.keywords import check_integer
from .._explanation import explain
from .._libraries import dtype_name, library_of, namespace_of, numpy_array
from .._libraries.protocols import Array, NumPyGenerator
from .._weights import attention_scores, attention_weights
from ..errors import ArgumentTypeError
from .panels import FONT, Theme, ThemeName, paint, theme_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS = 200
"""The number of random queries for each width; each query has its own random keys."""
LENGTHS = tuple(2**power for power in range(7, 18))
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def saturation(
    widths: Sequence[int] = (1, 4, 16, 64, 256, 1024),
    *,
    rng: NumPyGenerator,
    keys: int = 32,
    theme: ThemeName = "light",
) -> Figure:
    """Draw why scores are divided by the square root of E: else one key gets almost all of the weight.

    Queries and keys are drawn from N(0, 1). The left panel shows the variance of their scores, and the right
    panel the largest weight of a query, averaged over 200 queries.

    Args:
        widths: The widths E to simulate.
        rng: A numpy.random.Generator, which draws the queries and keys.
        keys: The number of keys S, at least 2.
        theme: "light" or "dark".

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
    colours = theme_of("plot.saturation", theme)
    from .shown_figure import ShownFigure

    widths = sorted(check_some_integers("plot.saturation", "widths", widths))
    keys = check_integer("plot.saturation", "keys", keys, least=2)
    if not library_of(numpy_array()).generators.owns(rng):
        hint = "Pass one, so that you can reproduce the picture."
        rule = "`rng` must be a numpy.random.Generator"
        raise ArgumentTypeError("plot.saturation", rule, {"rng": shown(rng)}, hint)
    variances, largest_weights = _simulate(widths, keys, rng)

    figure = ShownFigure((8, 3.4), colours.paper)
    variance, largest = figure.subplots(1, 2)
    styles = ((colours.contrast, "s--"), (colours.full, "o-"))
    _draw_lines(variance, widths, variances, styles)
    _draw_lines(largest, widths, largest_weights, styles)
    expected = {"linestyle": ":", "color": colours.ink, "linewidth": 1}
    variance.plot(widths, widths, label="expected, E and 1", **expected)
    variance.axhline(1, **expected)
    variance.set_yscale("log")
    largest.axhline(1 / keys, label=f"all keys alike, 1/{keys}", **expected)
    largest.set_ylim(0, 1.05)
    for axes, name in ((variance, "variance of the scores"), (largest, "largest weight of a query")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.minorticks_off()
        _finish(axes, colours, "width of queries and keys, E", name)
    return figure


def _simulate(widths: Sequence[int], keys: int, rng: Any) -> tuple[dict[str, list[float]], ...]:
    """Return the variances of the scores, and the largest weights, for each width, by scale."""
    scales = {"without scale": 1.0, "scale 1/√E": None}
    variances: dict[str, list[float]] = {label: [] for label in scales}
    largest: dict[str, list[float]] = {label: [] for label in scales}
    for width in widths:
        query, key = (rng.standard_normal((DRAWS, rows, width)) for rows in (1, keys))
        for label, scale in scales.items():
            variances[label].append(float(attention_scores(query, key, scale=scale).var()))
            largest[label].append(float(attention_weights(query, key, scale=scale).max(axis=-1).mean()))
    return variances, largest


def _draw_lines(axes: Any, places: Sequence[int], lines: Mapping[str, Sequence[float]], styles: Any) -> None:
    """Draw one line for each label, with one of the styles (colour, marker and line)."""
    for (label, numbers), (colour, style) in zip(lines.items(), styles, strict=True):
        axes.plot(places, numbers, style, color=colour, label=label, markersize=5)


def _finish(axes: Any, theme: Theme, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    paint(axes, theme)
    axes.legend(frameon=False, labelcolor=theme.ink, fontsize=FONT)


def memory(
    lengths: Sequence[int] = LENGTHS, *, width: int = 64, like: Any = None, theme: ThemeName = "light"
) -> Figure:
    """Draw the memory of all L x S scores of one head, and of the scores that are in memory at one time.

    S is equal to L. A third line shows what every implementation needs: query, key, value and output.

    Args:
        lengths: The lengths L to draw.
        width: The width E.
        like: An array with the library, dtype and device of the call. Default: float32 of NumPy.
        theme: "light" or "dark".

    Returns:
        A Matplotlib figure with two logarithmic axes.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: A length or the width is not an integer, or `like` is not a floating array.
        ValueError: A length or the width is below 1, or `lengths` is empty.

    Examples:
        >>> from sdpa_xp import plot
        >>> figure = plot.memory([1024, 4096])
        >>> scores = figure.axes[0].lines[0]
        >>> print(scores.get_label(), [int(size) for size in scores.get_ydata()])
        all scores, L x L [4194304, 67108864]

    References:
        Rabe and Staats, "Self-attention does not need O(n^2) memory", arXiv 2112.05682.
        Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1.
    """
    colours = theme_of("plot.memory", theme)
    from matplotlib.ticker import FuncFormatter, LogLocator

    from .shown_figure import ShownFigure

    lengths = sorted(check_some_integers("plot.memory", "lengths", lengths))
    width = check_integer("plot.memory", "width", width, least=1)
    element = _element_like(like)
    dtype = dtype_name(element.dtype)
    score_bytes = 8 if dtype == "float64" else 4  # scores have the accumulation dtype
    element_bytes = {"float64": 8, "float32": 4}.get(dtype, 2)  # 2 for float16 and bfloat16

    figure = ShownFigure((5.6, 3.8), colours.paper)
    axes = figure.subplots()
    sizes = {
        "all scores, L x L": [score_bytes * length**2 for length in lengths],
        "query, key, value, output": [4 * element_bytes * length * width for length in lengths],
        "scores held at one time": [
            score_bytes * _scores_in_memory(element, length, width) for length in lengths
        ],
    }
    styles = ((colours.contrast, "s--"), (colours.ink, "^:"), (colours.full, "o-"))
    _draw_lines(axes, lengths, sizes, styles)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(base=2**5, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _with_unit(size)))
    _finish(axes, colours, "queries and keys, L = S", "bytes, one head")
    return figure


def _element_like(like: Any) -> Array:
    """Return an array of one element with the library, dtype and device of `like`."""
    array = check_plain_array("plot.memory", "like", numpy_array() if like is None else like)
    xp = namespace_of(array)
    check_floating("plot.memory", "like", array)
    dtype = xp.float32 if like is None else array.dtype
    return xp.zeros((1, 1), dtype=dtype, device=library_of(array).device(array))


def _scores_in_memory(element: Array, length: int, width: int) -> int:
    """Count the scores in memory at one time.

    Nothing is computed. On NumPy and torch the broadcast inputs take no memory either.
    """
    array = namespace_of(element).broadcast_to(element, (length, width))
    plan = explain(array, array, array, implementation="xp")  # a kernel has no tiles of ours
    rows, columns = plan.tile
    # No more threads compute than there are ranges of queries.
    return min(plan.threads, -(-length // rows)) * rows * columns


def _with_unit(size: float) -> str:
    """Return a size with its unit, such as 64 KiB."""
    steps = itertools.takewhile(lambda power: size >= 1024**power, range(1, len(UNITS)))
    power = max(steps, default=0)
    return f"{size / 1024**power:g} {UNITS[power]}"
