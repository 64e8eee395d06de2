"""Maps of weights and of masks: rows are queries, columns are keys."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._checks import has_values, shown
from .._checks.arrays import check_floating, check_plain_array
from .._checks.integers import check_some_integers
from .._checks.keywords import check_block_size, check_integer
from .._checks.score_arrays import check_boolean, check_broadcasts
from .._libraries import is_number, library_of, namespace_of
from .._libraries.protocols import AnyArray, Array, Shape
from ..errors import ArgumentTypeError, ArgumentValueError
from ..masks import Mask
from ..masks.custom import as_boolean
from .panels import LETTER, ThemeName, grid, labels, paint, theme_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR = 0.18
"""The width of the colour bar in inches."""
LETTERS = 48
"""The longest line of the title of a mask."""


def attention(
    weights: AnyArray,
    *,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    mask: Mask | AnyArray | None = None,
    heads: int | Sequence[int] | None = None,
    block_size: int | tuple[int, int] | None = None,
    theme: ThemeName = "light",
) -> Figure:
    """Draw attention weights: rows are queries, columns are keys, and each head has a panel.

    Args:
        weights: (L, S) or (Hq, L, S), as `attention_weights` returns them; any library, any floating dtype. Or
            the `block_sums` of `attention_statistics`, for long sequences.
        query_tokens: A name for each of the L queries. Without names, the axis has numbers.
        key_tokens: A name for each of the S keys. If they need too much room, some are left out or cut.
        mask: A mask, or a boolean array that broadcasts to the weights; True = may attend. Masked pairs are
            hatched.
        heads: The heads to draw, one number or several, counted from 0. Default: all.
        block_size: The queries and keys of a block, as for `attention_statistics`, if `weights` are sums of
            blocks.
        theme: "light" or "dark".

    Returns:
        A Matplotlib figure. All panels share one scale of colours.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: The weights are not a floating array, or are inside a jit; the mask is not boolean; or a
            token is not a string.
        ValueError: The weights have another shape, are empty or are below 0; or tokens, mask or heads do not
            fit the weights; or a mask or tokens are passed with `block_size`.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import attention_weights, plot
        >>> x, words = np.eye(3), ["one", "minute", "."]
        >>> figure = plot.attention(attention_weights(x, x), key_tokens=words)
        >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
        ['one', 'minute', '.']

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, figures 3 to 5.
    """
    colours = theme_of("plot.attention", theme)
    from matplotlib.colors import LinearSegmentedColormap

    numbers = _check_weights(weights)
    shape = weights.shape
    queries, keys = shape[-2:]
    sizes = (1, 1) if block_size is None else check_block_size("plot.attention", block_size)
    for name, value in {"query_tokens": query_tokens, "key_tokens": key_tokens, "mask": mask}.items():
        if block_size is not None and value is not None:
            rule = f"`{name}` cannot be given with `block_size`, because a cell has several tokens"
            raise ArgumentValueError("plot.attention", rule, {name: shown(value), "block_size": block_size})
    query_tokens = _check_tokens("query_tokens", query_tokens, queries, "L")
    key_tokens = _check_tokens("key_tokens", key_tokens, keys, "S")
    heads_to_draw = _check_heads(heads, len(numbers))
    allowed = None if mask is None else _allowed_pairs(mask, shape)

    axis_labels = labels("query", query_tokens, queries, sizes[0]), labels("key", key_tokens, keys, sizes[1])
    drawing = grid(len(heads_to_draw), *axis_labels, colours)
    finite = [w for head in heads_to_draw for row in numbers[head] for w in row if math.isfinite(w)]
    ramp = LinearSegmentedColormap.from_list("weights", colours.ramp)
    for axes, head in zip(drawing.panels, heads_to_draw, strict=True):
        aspect = axes.get_aspect()  # imshow sets another one unless it gets it
        # All weights are 0 if every key is masked, and colours need a range.
        image = axes.imshow(numbers[head], cmap=ramp, vmin=0, vmax=max(finite, default=0) or 1, aspect=aspect)
        if len(shape) == 3:
            axes.set_title(f"head {head}")
        if allowed is not None:
            _hatch(axes, allowed[head], colours.ink)
    label = "weight" if block_size is None else "sum of weights"
    label += "" if mask is None else "\n(hatched: masked)"
    width, height = drawing.inches
    beside: Any = {"ax": drawing.panels, "fraction": BAR / width, "aspect": height / BAR}
    bar = drawing.figure.colorbar(image, label=label, **beside)
    paint(bar.ax, colours)
    bar.outline.set_edgecolor(colours.ink)
    drawing.hold_texts()
    return drawing.figure


def mask(mask: Mask, shape: tuple[int, ...], *, like: Any = None, theme: ThemeName = "light") -> Figure:
    """Draw which pairs may attend: rows are queries, columns are keys, and filled cells may attend.

    Cells of all small masks have the same size, so you can show them side by side.

    Args:
        mask: A mask. All other arguments and errors are as in `masks.to_array`.
        shape: (L, S), or (..., Hq, L, S), with one panel for each batch entry and head; no length is 0.
        theme: "light" or "dark".

    Returns:
        A Matplotlib figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Examples:
        >>> from sdpa_xp import masks, plot
        >>> figure = plot.mask(masks.causal() & masks.sliding_window(3, 0), (8, 8))
        >>> figure.axes[0].get_xlabel()
        'key'

    References:
        Dong et al., "Flex Attention", arXiv 2412.05496, figure 2.
    """
    colours = theme_of("plot.mask", theme)
    from matplotlib.colors import ListedColormap

    allowed = as_boolean("plot.mask", mask, shape, like=like)
    _check_not_empty("plot.mask", "shape", shape)
    leading, (queries, keys) = shape[:-2], shape[-2:]
    title = "" if leading else textwrap.fill(str(mask), LETTERS)
    least_width = 1.3 + 1.2 * LETTER * max(map(len, title.splitlines()), default=0)
    axis_labels = labels("query", None, queries), labels("key", None, keys)
    drawing = grid(math.prod(leading), *axis_labels, colours, least_side=0)
    shades = ListedColormap([colours.empty, colours.full])
    for index, axes in zip(itertools.product(*map(range, leading)), drawing.panels, strict=True):
        pairs = _check_readable("plot.mask", "mask", allowed[(*index, ...)])
        axes.imshow(pairs, cmap=shades, vmin=0, vmax=1, aspect=axes.get_aspect())
        axes.set_title(_panel_title(index) if index else title)
    drawing.fit(least_width=least_width)
    return drawing.figure


def _check_weights(value: object) -> list[list[list[float]]]:
    """Check weights (L, S) or (Hq, L, S), none below 0, and return them as lists for each head."""
    array = check_plain_array("plot.attention", "weights", value)
    check_floating("plot.attention", "weights", array)
    if array.ndim not in (2, 3):
        rule = "`weights` must be (L, S) or (Hq, L, S)"
        hint = "One entry of a batch is weights[0, ...]." if array.ndim > 3 else ""
        raise ArgumentValueError("plot.attention", rule, {"weights.shape": array.shape}, hint)
    _check_not_empty("plot.attention", "weights.shape", array.shape)
    numbers: Any = _check_readable("plot.attention", "weights", array)
    heads = numbers if array.ndim == 3 else [numbers]
    if any(weight < 0 for rows in heads for row in rows for weight in row):
        least = min(weight for rows in heads for row in rows for weight in row)
        hint = "Compute them with `attention_weights`; scores are not weights."
        raise ArgumentValueError(
            "plot.attention", "`weights` must not be below 0", {"smallest weight": least}, hint
        )
    # In lists, which Matplotlib takes: it takes arrays of NumPy, and not those of each library.
    return [[[float(weight) for weight in row] for row in rows] for rows in heads]


def _check_tokens(name: str, value: object, count: int, letter: str) -> Sequence[str] | None:
    """Check a name for each query or key, or None, and return it."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or any(type(x) is not str for x in value):
        raise ArgumentTypeError("plot.attention", f"`{name}` must be a list of strings", {name: repr(value)})
    if len(value) != count:
        rule = f"`{name}` must have one string for each entry of its axis of `weights` ({letter})"
        raise ArgumentValueError("plot.attention", rule, {f"len({name})": len(value), letter: count})
    return value


def _check_heads(value: object, count: int) -> list[int]:
    """Check the numbers of heads, and return them in a list; None is all heads."""
    if value is None:
        return [*range(count)]
    if is_number(value):
        chosen = [check_integer("plot.attention", "heads", value, least=0)]
    else:
        chosen = check_some_integers("plot.attention", "heads", value, least=0)
    if max(chosen) >= count:
        rule = "`heads` must be below Hq, the number of heads of `weights`"
        raise ArgumentValueError("plot.attention", rule, {"heads": value, "Hq": count})
    return chosen


def _check_not_empty(function: str, name: str, shape: Shape) -> None:
    """Check that there is something to draw."""
    if 0 in shape:
        raise ArgumentValueError(function, f"`{name}` must have no axis of length 0", {name: shape})


def _check_readable(function: str, name: str, array: Array) -> Any:
    """Check that the numbers of an array can be read, and return them in nested lists."""
    library = library_of(array)
    if not has_values(array) and library.chunks is None:  # chunks are computed when they are read
        rule = f"`{name}` must have numbers that can be read now, so not inside a jit"
        raise ArgumentTypeError(function, rule, {name: shown(array)})
    return library.to_list(array)


def _allowed_pairs(mask: Mask | AnyArray, shape: Shape) -> list[list[list[bool]]]:
    """Return which pairs may attend, for each head."""
    if isinstance(mask, Mask):
        array = as_boolean("plot.attention", mask, shape)
    else:
        array = check_plain_array("plot.attention", "mask", mask)
        check_boolean("plot.attention", "mask", array)
        letters = "(Hq, L, S)" if len(shape) == 3 else "(L, S)"
        check_broadcasts("plot.attention", "mask", array.shape, shape, letters)
        array = namespace_of(array).broadcast_to(array, shape)
    pairs: Any = _check_readable("plot.attention", "mask", array)
    return pairs if len(shape) == 3 else [pairs]


def _hatch(axes: Any, allowed: Sequence[Sequence[bool]], ink: str) -> None:
    """Hatch the masked pairs: neighbours in a row as one bar."""
    # Not cell by cell: the SVG of a long map would be many times as large.
    for row, pairs in enumerate(allowed):
        groups = itertools.groupby(range(len(pairs)), pairs.__getitem__)
        runs = [[*run] for attended, run in groups if not attended]
        bars = [(run[0] - 0.5, len(run)) for run in runs]
        style = {"facecolor": "none", "hatch": "////", "edgecolor": ink, "linewidth": 0, "alpha": 0.4}
        axes.broken_barh(bars, (row - 0.5, 1), **style)


def _panel_title(index: tuple[int, ...]) -> str:
    """Return which batch entry and head a panel shows, as "batch 1, head 0"."""
    *entry, head = index
    return f"batch {', '.join(map(str, entry))}, head {head}" if entry else f"head {head}"
