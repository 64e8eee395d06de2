"""The memory of all L x S scores, compared with the memory of the tiles that are computed at one time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdpa_xp._checks.arrays import check_floating, check_plain_array
from sdpa_xp._checks.numbers import check_integer
from sdpa_xp._checks.plots import check_lengths
from sdpa_xp._libraries import device_of, dtype_name, namespace_of, numpy_array
from sdpa_xp._libraries.protocols import Array
from sdpa_xp.explanation import explain
from sdpa_xp.plot.panels import FONT, ThemeName, paint, theme_of
from sdpa_xp.plot.requirements import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUNCTION = "plot.memory"
LENGTHS = tuple(2**power for power in range(7, 18))
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def memory(
    lengths: Sequence[int] = LENGTHS,
    *,
    width: int = 64,
    like: Any = None,
    theme: ThemeName = "light",
) -> Figure:
    """Draw the memory of all L x S scores of one head, and of the scores that are in memory at one time.

    The number of keys S is equal to the number of queries L. The scores in memory at one time are one tile for
    each thread, as `explain` reports for the portable implementation. A third line shows the memory that every
    implementation needs: query, key, value and output.

    Shapes:
        `E` width of queries, keys and values, `L` queries, `S` keys.

    Args:
        lengths: The lengths L to draw.
        width: The width E.
        like: An array with the library, dtype and device of the call. Default: float32 of NumPy.
        theme: "light" or "dark", for the page that shows the figure.

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
    require_matplotlib(FUNCTION)
    from matplotlib.ticker import FuncFormatter, LogLocator

    from sdpa_xp.plot.shown_figure import ShownFigure

    colours = theme_of(FUNCTION, theme)
    lengths = sorted(check_lengths(FUNCTION, "lengths", lengths))
    width = check_integer(FUNCTION, "width", width, least=1)
    element = _element_like(like)
    dtype = dtype_name(element.dtype)
    score_bytes = 8 if dtype == "float64" else 4
    element_bytes = {"float64": 8, "float32": 4}.get(dtype, 2)

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
    for (label, values), (colour, style) in zip(sizes.items(), styles, strict=True):
        axes.plot(lengths, values, style, color=colour, label=label, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(base=2**5, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _with_unit(size)))
    axes.set_xlabel("queries and keys, L = S")
    axes.set_ylabel("bytes, one head")
    paint(axes, colours)
    axes.legend(frameon=False, labelcolor=colours.ink, fontsize=FONT)
    return figure


def _element_like(like: Any) -> Array:
    """Return an array of one element with the library, dtype and device of `like`."""
    array = check_plain_array(FUNCTION, "like", numpy_array() if like is None else like)
    xp = namespace_of(array)
    check_floating(FUNCTION, "like", array)
    dtype = xp.float32 if like is None else array.dtype
    return xp.zeros((1, 1), dtype=dtype, device=device_of(array))


def _scores_in_memory(element: Array, length: int, width: int) -> int:
    """Count the scores in memory at one time.

    Nothing is computed. On NumPy and torch the broadcast inputs take no memory either.
    """
    array = namespace_of(element).broadcast_to(element, (length, width))
    plan = explain(array, array, array, implementation="xp")
    rows, columns = plan.tile
    return min(plan.threads, -(-length // rows)) * rows * columns


def _with_unit(size: float) -> str:
    """Return a size with its unit, such as 64 KiB."""
    steps = itertools.takewhile(lambda power: size >= 1024**power, range(1, len(UNITS)))
    power = max(steps, default=0)
    return f"{size / 1024**power:g} {UNITS[power]}"
