"""Attention maps: which keys each query attends to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sdpa_xp._checks.arrays import check_plain_array
from sdpa_xp._checks.plots import check_allowed, check_heads, check_readable, check_tokens, check_weights
from sdpa_xp._libraries.protocols import AnyArray, Shape
from sdpa_xp.masks import Mask
from sdpa_xp.masks.custom import as_boolean
from sdpa_xp.plot.panels import ThemeName, grid, labels, paint, theme_of
from sdpa_xp.plot.requirements import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.path import Path

FUNCTION = "plot.attention"
BAR = 0.18
"""The width of the colour bar in inches."""


def attention(
    weights: AnyArray,
    *,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    mask: Mask | AnyArray | None = None,
    heads: int | Sequence[int] | None = None,
    theme: ThemeName = "light",
) -> Figure:
    """Draw attention weights: rows are queries, columns are keys, and each head has a panel.

    All panels share one scale of colours.

    Shapes:
        `Hq` query heads, `L` queries, `S` keys.

    Args:
        weights: (L, S) or (Hq, L, S), as `attention_weights` returns them; any library, any floating dtype.
        query_tokens: A name for each of the L queries. Without names, the axis has numbers.
        key_tokens: A name for each of the S keys. If the names need too much room, some are left out. A name of
            more than 24 letters is cut.
        mask: A mask, or a boolean array that broadcasts to the weights; True = may attend. Masked pairs are
            hatched.
        heads: The heads to draw, one number or several, counted from 0. Default: all.
        theme: "light" or "dark", for the page that shows the figure.

    Returns:
        A Matplotlib figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: The weights are not a floating array, or are inside a jit; the mask is not boolean; or a
            token is not a string.
        ValueError: The weights have another shape, are empty or are below 0; or tokens, mask or heads do not
            fit the weights.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import attention_weights, masks, plot
        >>> x, words = np.eye(3), ["one", "minute", "."]
        >>> weights = attention_weights(x, x, is_causal=True)
        >>> figure = plot.attention(
        ...     weights, query_tokens=words, key_tokens=words, mask=masks.causal()
        ... )
        >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
        ['one', 'minute', '.']

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, figures 3 to 5.
    """
    require_matplotlib(FUNCTION)
    from matplotlib.colors import LinearSegmentedColormap

    colours = theme_of(FUNCTION, theme)
    numbers = check_weights(FUNCTION, weights)
    shape = weights.shape
    queries, keys = shape[-2:]
    query_tokens = check_tokens(FUNCTION, "query_tokens", query_tokens, queries, "L")
    key_tokens = check_tokens(FUNCTION, "key_tokens", key_tokens, keys, "S")
    heads_to_draw = check_heads(FUNCTION, heads, len(numbers))
    allowed = None if mask is None else _allowed_pairs(mask, shape)

    axis_labels = labels("query", query_tokens, queries), labels("key", key_tokens, keys)
    figure, panels, inches, _ = grid(len(heads_to_draw), *axis_labels, colours)
    finite = [w for head in heads_to_draw for row in numbers[head] for w in row if math.isfinite(w)]
    ramp = LinearSegmentedColormap.from_list("weights", colours.ramp)
    for axes, head in zip(panels, heads_to_draw, strict=True):
        aspect = axes.get_aspect()
        image = axes.imshow(numbers[head], cmap=ramp, vmin=0, vmax=max(finite, default=0) or 1, aspect=aspect)
        if len(shape) == 3:
            axes.set_title(f"head {head}")
        if allowed is not None:
            _hatch(axes, allowed[head], colours.ink)
    label = "weight" if mask is None else "weight\n(hatched: masked)"
    width, height = inches
    bar = figure.colorbar(image, ax=panels, label=label, fraction=BAR / width, aspect=height / BAR)
    paint(bar.ax, colours)
    bar.outline.set_edgecolor(colours.ink)
    return figure


def _allowed_pairs(mask: Mask | AnyArray, shape: Shape) -> list[list[list[bool]]]:
    """Return which pairs may attend, for each head."""
    if isinstance(mask, Mask):
        array = as_boolean(FUNCTION, mask, shape)
    else:
        array = check_allowed(FUNCTION, check_plain_array(FUNCTION, "mask", mask), shape)
    pairs: Any = check_readable(FUNCTION, "mask", array)
    return pairs if len(shape) == 3 else [pairs]


def _hatch(axes: Any, allowed: Sequence[Sequence[bool]], ink: str) -> None:
    """Hatch the masked pairs: neighbours in a row as one rectangle, and all rectangles as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    masked = [_rectangle(row, run) for row, pairs in enumerate(allowed) for run in _masked_runs(pairs)]
    if masked:
        path = Path.make_compound_path(*masked)
        axes.add_patch(PathPatch(path, fill=False, hatch="////", edgecolor=ink, linewidth=0, alpha=0.4))


def _masked_runs(allowed: Sequence[bool]) -> Iterator[range]:
    """Yield the ranges of neighbouring keys that are masked."""
    for attended, group in itertools.groupby(range(len(allowed)), allowed.__getitem__):
        if not attended:
            run = [*group]
            yield range(run[0], run[-1] + 1)


def _rectangle(row: int, keys: range) -> Path:
    from matplotlib.path import Path

    left, right, top, bottom = keys.start - 0.5, keys.stop - 0.5, row - 0.5, row + 0.5
    return Path([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], closed=True)
