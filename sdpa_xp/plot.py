"""Pictures. matplotlib figures are returned; nothing is shown or saved. Needs `pip install 'sdpa_xp[plot]'`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sdpa_xp.masks import Mask, to_array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ATTENDED, MASKED = "#0072B2", "#F2F2F2"  # blue on grey: told apart without colour vision, and in print


def mask(mask: Mask, shape: tuple[int, ...], *, like: Any = None) -> Figure:
    """A picture of which pairs may attend: a row a query, a column a key, a panel a batch entry and head.

    Shapes:
        `Hq` query heads, `L` queries, `S` keys, `...` batch.

    Args:
        mask: A mask.
        shape: (L, S), or (..., Hq, L, S), with a panel for each of the leading indices.
        like: As for `masks.to_array`.

    Returns:
        A figure of matplotlib.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: As for `masks.to_array`.
        ValueError: As for `masks.to_array`.

    Examples:
        >>> from sdpa_xp import masks, plot
        >>> figure = plot.mask(masks.causal() & masks.sliding_window(3, 0), (8, 8))
        >>> figure.axes[0].get_xlabel()
        'key'

    References:
        Dong et al., "Flex Attention", arXiv 2412.05496, figure 2.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    allowed = to_array(mask, shape, like=like)
    count, (queries, keys) = math.prod(shape[:-2]), shape[-2:]
    columns = min(count, 4)
    rows = -(-count // columns)
    width, height = min(keys / max(keys, queries), 1), min(queries / max(keys, queries), 1)
    figure = Figure(figsize=(1 + 3 * columns * width, 1 + 3 * rows * height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel, axes in enumerate(panels.flat):
        axes.set_visible(panel < count)
        if panel < count:
            index = _unravelled(panel, shape[:-2])
            axes.imshow(_numbers(allowed[index]), cmap=ListedColormap([MASKED, ATTENDED]), vmin=0, vmax=1)
            axes.set_xlabel("key")
            axes.set_ylabel("query")
            axes.set_title(", ".join(map(str, index)) if index else str(mask), fontsize=9)
    return figure


def _numbers(allowed: Any) -> list[list[float]]:
    rows, columns = allowed.shape
    return [[float(allowed[i, j]) for j in range(columns)] for i in range(rows)]


def _unravelled(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for length in reversed(shape):
        number, last = divmod(number, length)
        index.insert(0, last)
    return tuple(index)
