"""What pictures share: ink for the page that they are for, and panels of pairs, a row a query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from sdpa_xp import _checks as checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ThemeName: TypeAlias = Literal["light", "dark"]


class Theme(NamedTuple):
    """Colours for a page; what is small or empty is near to the page's own."""

    ink: str
    ramp: tuple[str, ...]
    """From 0 to the largest weight: one hue, ever further from the page."""
    empty: str
    full: str
    other: str


THEMES = {
    "light": Theme("#24292f", ("#fafcfe", "#9ecae1", "#2f7ebc", "#08306b"), "#f2f2f2", "#0072b2", "#d55e00"),
    "dark": Theme("#e6edf3", ("#151a21", "#0c4a80", "#4a9fd8", "#e8f4fd"), "#2d333b", "#56b4e9", "#e69f00"),
}
"""The last two of each are of Okabe and Ito, "Color universal design", 2008."""

CELL, LEAST, MOST, MOST_OF_MANY = 0.32, 1.4, 10.0, 2.6
"""Inches of a cell, and of a panel: at least, at most, and at most where there are several."""
COLUMNS = 4
FONT = 8
LINE, LETTER = 0.15, 0.07
"""Inches that a line of text takes in that size, and that a letter does."""
LONGEST = 24
"""Letters of a token that are shown."""


class Labels(NamedTuple):
    """What stands along one axis."""

    name: str
    texts: list[str]

    @property
    def inches(self) -> float:
        """How long the longest is."""
        return LETTER * max(map(len, self.texts))


class Grid(NamedTuple):
    """A figure with a panel for each of several arrays (L, S)."""

    figure: Figure
    panels: list[Any]
    inches: tuple[float, float]
    """Of all panels together."""


def labels(name: str, tokens: Sequence[str] | None, count: int) -> Labels:
    """The tokens, or numbers."""
    return Labels(name, [*map(_shortened, map(str, range(count)) if tokens is None else tokens)])


def theme_of(function: str, name: str) -> Theme:
    checks.named(function, "theme", name, [*THEMES])
    return THEMES[name]


def grid(count: int, of_query: Labels, of_key: Labels, theme: Theme, *, least: float = 0) -> Grid:
    """Panels with queries downwards and keys to the right, `least` inches wide; the outer ones have labels."""
    from matplotlib.figure import Figure

    columns = min(count, COLUMNS)
    rows, most = -(-count // columns), MOST if count == 1 else MOST_OF_MANY
    queries, keys = len(of_query.texts), len(of_key.texts)
    width, height = (min(max(CELL * length, LEAST), most) for length in (keys, queries))
    inches = columns * (width + 0.15), rows * (height + 0.35)
    beside = of_query.inches + (1.4 + 0.05 * width if count == 1 else 1.1)
    size = max(inches[0] + beside, least), inches[1] + of_key.inches + 0.3
    figure = Figure(figsize=size, layout="constrained", facecolor="none")
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for number, axes in enumerate(panels):
        axes.set_visible(number < count)
        axes.set_aspect("equal" if math.isclose(width * queries, height * keys) else "auto")
        _label(axes.xaxis, of_key, width)
        _label(axes.yaxis, of_query, height)
        if number + columns < count:
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
        if number % columns:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
        paint(axes, theme)
    return Grid(figure, panels[:count], inches)


def paint(axes: Any, theme: Theme) -> None:
    """The frame and the letters of `axes` in the theme's ink, on no ground."""
    axes.set_facecolor("none")
    axes.tick_params(which="both", colors=theme.ink, labelsize=FONT)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set(color=theme.ink, fontsize=FONT + 1)
    for spine in axes.spines.values():
        spine.set_edgecolor(theme.ink)


def _label(axis: Any, labels: Labels, inches: float) -> None:
    """Ticks for as many tokens as there is room for."""
    axis.set_label_text(labels.name)
    count = len(labels.texts)
    step = _step(LINE * count / inches)
    places = range(0, count, step)
    axis.set_ticks(places, [labels.texts[place] for place in places], parse_math=False)  # "$" is a token
    if axis.axis_name == "x" and labels.inches + LETTER > inches * step / count:
        axis.set_tick_params(rotation=90)


def _step(least: float) -> int:
    """The first of 1, 2, 5, 10, 20, 50 and so on that is not below `least`."""
    power = 1
    while 10 * power < least:
        power *= 10
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least)


def _shortened(token: str) -> str:
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in token)
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
