"""Which pairs may attend."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from sdpa_xp import _checks as checks
from sdpa_xp.masks import Mask, to_array
from sdpa_xp.plot.drawing import need_matplotlib
from sdpa_xp.plot.panels import LETTER, ThemeName, grid, labels, theme_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUNCTION = "plot.mask"
LETTERS = 48
"""Of a line of the title."""


def mask(mask: Mask, shape: tuple[int, ...], *, like: Any = None, theme: ThemeName = "light") -> Figure:
    """A picture of which pairs may attend: a row a query, a column a key, a panel a batch entry and head.

    Shapes:
        `Hq` query heads, `L` queries, `S` keys, `...` batch.

    Args:
        mask: A mask.
        shape: (L, S), or (..., Hq, L, S), with a panel for each of the leading indices.
        like: As for `masks.to_array`.
        theme: "light" or "dark", the page that the picture is for.

    Returns:
        A figure of matplotlib.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: As for `masks.to_array`.
        ValueError: As for `masks.to_array`; a shape with an axis of length 0.

    Examples:
        >>> from sdpa_xp import masks, plot
        >>> figure = plot.mask(masks.causal() & masks.sliding_window(3, 0), (8, 8))
        >>> figure.axes[0].get_xlabel()
        'key'

    References:
        Dong et al., "Flex Attention", arXiv 2412.05496, figure 2.
    """
    need_matplotlib(FUNCTION)
    from matplotlib.colors import ListedColormap

    colours = theme_of(FUNCTION, theme)
    allowed = to_array(mask, shape, like=like)
    checks.not_empty(FUNCTION, "shape", shape)
    leading, (queries, keys) = shape[:-2], shape[-2:]
    title = "" if leading else textwrap.fill(str(mask), LETTERS)
    least = 1.3 + 1.2 * LETTER * max(map(len, title.splitlines()), default=0)
    along = labels("query", None, queries), labels("key", None, keys)
    figure, panels, _ = grid(math.prod(leading), *along, colours, least=least)
    shades = ListedColormap([colours.empty, colours.full])
    for number, axes in enumerate(panels):
        index = _unravelled(number, leading)
        pairs = checks.readable(FUNCTION, "mask", allowed[(*index, ...)])
        axes.imshow(pairs, cmap=shades, vmin=0, vmax=1, aspect=axes.get_aspect())
        axes.set_title(", ".join(map(str, index)) or title)
    return figure


def _unravelled(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for length in reversed(shape):
        number, last = divmod(number, length)
        index.insert(0, last)
    return tuple(index)
