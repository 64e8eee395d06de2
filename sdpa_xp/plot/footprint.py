"""The memory of L x S scores, beside that of the tiles that are held of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import device_of, dtype_name, namespace_of, numpy_array
from sdpa_xp._libraries.protocols import Array
from sdpa_xp.explanation import explain
from sdpa_xp.plot.drawing import need_matplotlib
from sdpa_xp.plot.panels import FONT, ThemeName, paint, theme_of

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
    """The bytes of all scores of one head, L x S, and of those that are held at one time, for L = S.

    What is held is the tile of each thread, as `explain` says it for the portable implementation. A third line
    has what cannot be saved: query, key, value and output.

    Shapes:
        `E` width of queries, keys and values, `L` queries, `S` keys.

    Args:
        lengths: Each L to draw.
        width: E.
        like: An array of the library and dtype, and on the device, that the call would be for; by default
            float32 of NumPy.
        theme: "light" or "dark", the page that the picture is for.

    Returns:
        A figure of matplotlib. Both its axes are logarithmic.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: Lengths or a width that are no integers, `like` that is no floating array.
        ValueError: A length or a width below 1, or no length.

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
    need_matplotlib(FUNCTION)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    colours = theme_of(FUNCTION, theme)
    lengths = sorted(checks.lengths(FUNCTION, "lengths", lengths))
    width = checks.integer(FUNCTION, "width", width, least=1)
    reference = _reference(like)
    wide = dtype_name(reference.dtype)
    score, element = 8 if wide == "float64" else 4, {"float64": 8, "float32": 4}.get(wide, 2)

    figure = Figure(figsize=(5.6, 3.8), layout="constrained", facecolor="none")
    axes = figure.subplots()
    sizes = {
        "all scores, L x L": [score * length**2 for length in lengths],
        "query, key, value, output": [4 * element * length * width for length in lengths],
        "scores held at one time": [score * _held(reference, length, width) for length in lengths],
    }
    styles = ((colours.other, "s--"), (colours.ink, "^:"), (colours.full, "o-"))
    for (label, values), (colour, style) in zip(sizes.items(), styles, strict=True):
        axes.plot(lengths, values, style, color=colour, label=label, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(base=2**5, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _in_units(size)))
    axes.set_xlabel("queries and keys, L = S")
    axes.set_ylabel("bytes, one head")
    paint(axes, colours)
    axes.legend(frameon=False, labelcolor=colours.ink, fontsize=FONT)
    return figure


def _reference(like: Any) -> Array:
    """One number of the library and dtype."""
    array = checks.plain_array(FUNCTION, "like", numpy_array() if like is None else like)
    xp = namespace_of(array)
    checks.floating(FUNCTION, "like", array)
    dtype = xp.float32 if like is None else array.dtype
    return xp.zeros((1, 1), dtype=dtype, device=device_of(array))


def _held(reference: Array, length: int, width: int) -> int:
    """Scores that are held at one time; nothing is computed, and on NumPy and torch no memory taken."""
    array = namespace_of(reference).broadcast_to(reference, (length, width))
    found = explain(array, array, array, implementation="xp")
    rows, columns = found.tile
    return min(found.threads, -(-length // rows)) * rows * columns


def _in_units(size: float) -> str:
    """Such as 64 KiB."""
    steps = itertools.takewhile(lambda power: size >= 1024**power, range(1, len(UNITS)))
    power = max(steps, default=0)
    return f"{size / 1024**power:g} {UNITS[power]}"
