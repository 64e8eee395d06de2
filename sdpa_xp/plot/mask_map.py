"""Mask maps: which pairs may attend."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from sdpa_xp._checks.plots import check_not_empty, check_readable
from sdpa_xp.masks import Mask
from sdpa_xp.masks.custom import as_boolean
from sdpa_xp.plot.panels import LETTER, ThemeName, grid, labels, theme_of
from sdpa_xp.plot.requirements import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUNCTION = "plot.mask"
LETTERS = 48
"""The longest line of the title."""


def mask(mask: Mask, shape: tuple[int, ...], *, like: Any = None, theme: ThemeName = "light") -> Figure:
    """Draw which pairs may attend: rows are queries, columns are keys, and filled cells may attend.

    Cells have the same size in all small masks, whatever their shape, so you can show them side by side.

    Shapes:
        `Hq` query heads, `L` queries, `S` keys, `...` batch.

    Args:
        mask: A mask.
        shape: (L, S), or (..., Hq, L, S), with one panel for each batch entry and head.
        like: An array with the library and the device to compute the mask with, as for `masks.to_array`.
        theme: "light" or "dark", for the page that shows the figure.

    Returns:
        A Matplotlib figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: As for `masks.to_array`.
        ValueError: As for `masks.to_array`; or the shape has an axis of length 0.

    Examples:
        >>> from sdpa_xp import masks, plot
        >>> figure = plot.mask(masks.causal() & masks.sliding_window(3, 0), (8, 8))
        >>> figure.axes[0].get_xlabel()
        'key'

    References:
        Dong et al., "Flex Attention", arXiv 2412.05496, figure 2.
    """
    require_matplotlib(FUNCTION)
    from matplotlib.colors import ListedColormap

    colours = theme_of(FUNCTION, theme)
    allowed = as_boolean(FUNCTION, mask, shape, like=like)
    check_not_empty(FUNCTION, "shape", shape)
    leading, (queries, keys) = shape[:-2], shape[-2:]
    title = "" if leading else textwrap.fill(str(mask), LETTERS)
    least_width = 1.3 + 1.2 * LETTER * max(map(len, title.splitlines()), default=0)
    axis_labels = labels("query", None, queries), labels("key", None, keys)
    drawing = grid(math.prod(leading), *axis_labels, colours, least_side=0)
    shades = ListedColormap([colours.empty, colours.full])
    for number, axes in enumerate(drawing.panels):
        index = _unravel_index(number, leading)
        pairs = check_readable(FUNCTION, "mask", allowed[(*index, ...)])
        axes.imshow(pairs, cmap=shades, vmin=0, vmax=1, aspect=axes.get_aspect())
        axes.set_title(_panel_title(index) if index else title)
    drawing.fit(least_width=least_width)
    return drawing.figure


def _panel_title(index: tuple[int, ...]) -> str:
    """Return which batch entry and head a panel shows, as "batch 1, head 0"."""
    *entry, head = index
    if not entry:
        return f"head {head}"
    return f"batch {', '.join(map(str, entry))}, head {head}"


def _unravel_index(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of element `number` of an array of that shape."""
    index: list[int] = []
    for length in reversed(shape):
        number, last = divmod(number, length)
        index.insert(0, last)
    return tuple(index)
