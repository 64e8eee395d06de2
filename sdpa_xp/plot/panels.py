"""The parts that all plots share: themes, and grids of panels whose rows are queries and columns are keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from .._checks import install_hint
from .._checks.keywords import check_choice
from ..errors import Message

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import LayoutEngine

ThemeName: TypeAlias = Literal["light", "dark"]
"""The colours of a picture, for a light or a dark page."""


class Theme(NamedTuple):
    """The colours for a page. Small and empty values have colours near the page's own."""

    paper: str
    """The background of a file."""
    ink: str
    ramp: tuple[str, ...]
    """The colours from 0 to the largest weight: one hue, with a growing contrast to the page."""
    empty: str
    full: str
    contrast: str


THEMES = {
    "light": Theme(
        "#ffffff", "#24292f", ("#fafcfe", "#9ecae1", "#2f7ebc", "#08306b"), "#f2f2f2", "#0072b2", "#d55e00"
    ),
    "dark": Theme(
        "#0d1117", "#e6edf3", ("#151a21", "#0c4a80", "#4a9fd8", "#e8f4fd"), "#2d333b", "#56b4e9", "#e69f00"
    ),
}
"""`full` and `contrast` are colours of Okabe and Ito, "Color universal design", 2008."""

CELL, LEAST, MOST, MOST_OF_MANY = 0.32, 1.4, 10.0, 2.6
"""Inches: a cell, the smallest panel of weights, the largest panel, and the largest panel of several."""
COLUMNS = 4
FONT = 8
LINE, LETTER = 0.15, 0.07
"""Inches: the height of a line of text in that font size, and the width of a letter."""
EDGE = 0.02
"""Inches without ink."""
LONGEST = 24
"""The number of letters of a token that are shown."""


class Labels(NamedTuple):
    """The name and the ticks of one axis."""

    name: str
    texts: list[str]

    @property
    def inches(self) -> float:
        """The length of the longest text."""
        return LETTER * max(map(len, self.texts))


class Grid(NamedTuple):
    """A figure with one panel for each (L, S) array."""

    figure: Figure
    panels: list[Any]
    inches: tuple[float, float]
    """The width and height of all panels together."""
    panel_inches: tuple[float, float]
    """The width and height of one panel."""

    def fit(self, *, least_width: float) -> None:
        """Resize the figure, at least to `least_width` inches, so that each panel has its own size.

        The room around the panels depends on their texts, so it is measured after these are set.
        """
        engine = cast("LayoutEngine", self.figure.get_layout_engine())
        aspects = [axes.get_aspect() for axes in self.panels]
        for axes in self.panels:  # an equal aspect would not fill the room that the layout gives to a panel
            axes.set_aspect("auto")
        engine.execute(self.figure)
        panel, size = self.panels[0].get_position(), self.figure.get_size_inches()
        rows, columns = self.panels[0].get_gridspec().get_geometry()
        width = size[0] + columns * (self.panel_inches[0] - panel.width * size[0])
        height = size[1] + rows * (self.panel_inches[1] - panel.height * size[1])
        self.figure.set_size_inches(max(width, least_width), height)
        for axes, aspect in zip(self.panels, aspects, strict=True):
            axes.set_aspect(aspect)

    def hold_texts(self) -> None:
        """Enlarge the figure if a text comes too near to its edge: the room beside panels is an estimate."""
        cast("LayoutEngine", self.figure.get_layout_engine()).execute(self.figure)
        (left, low), (right, high) = self.figure.get_tightbbox().get_points()
        width, height = self.figure.get_size_inches()
        width += max(0, EDGE - left) + max(0, right + EDGE - width)
        self.figure.set_size_inches(width, height + max(0, EDGE - low) + max(0, high + EDGE - height))


def labels(name: str, tokens: Sequence[str] | None, count: int, step: int = 1) -> Labels:
    """Return the labels of an axis: the tokens, or numbers from 0 that grow by `step`."""
    numbers = map(str, range(0, count * step, step))
    return Labels(name, [*map(_shorten, numbers if tokens is None else tokens)])


def theme_of(function: str, name: str) -> Theme:
    """Return a theme by its name, or raise an error that says how to install matplotlib, if it is missing."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        rule, hint = "matplotlib must be installed", install_hint("plot")
        raise ModuleNotFoundError(Message(function, rule, {"error": error}, hint), name="matplotlib") from None
    check_choice(function, "theme", name, [*THEMES])
    return THEMES[name]


def grid(
    count: int, query_labels: Labels, key_labels: Labels, theme: Theme, *, least_side: float = LEAST
) -> Grid:
    """Return a figure with `count` panels, none shorter than `least_side` inches; the outer ones have labels.

    Queries run downwards, keys to the right.
    """
    from .shown_figure import ShownFigure  # a class of Matplotlib, which only pictures need

    columns = min(count, COLUMNS)
    rows, most = -(-count // columns), MOST if count == 1 else MOST_OF_MANY
    queries, keys = len(query_labels.texts), len(key_labels.texts)
    width, height = (min(max(CELL * length, least_side), most) for length in (keys, queries))
    room = width if count == 1 else max(width, LEAST)  # for the title of each panel
    inches = columns * (room + 0.15), rows * (height + 0.35)
    beside_panels = query_labels.inches + (1.4 + 0.05 * width if count == 1 else 1.1)
    size = inches[0] + beside_panels, inches[1] + key_labels.inches + 0.3
    figure = ShownFigure(size, theme.paper)
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for number, axes in enumerate(panels):
        axes.set_visible(number < count)
        # Cells are squares unless a side of the panel met its limits.
        axes.set_aspect("equal" if math.isclose(width * queries, height * keys) else "auto")
        _label(axes.xaxis, key_labels, width)
        _label(axes.yaxis, query_labels, height)
        if number + columns < count:
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
        if number % columns:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
        paint(axes, theme)
    return Grid(figure, panels[:count], inches, (room, height))


def paint(axes: Any, theme: Theme) -> None:
    """Paint the frame and the text of `axes` in the theme's ink, on a transparent background."""
    axes.set_facecolor("none")
    axes.tick_params(which="both", colors=theme.ink, labelsize=FONT)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set(color=theme.ink, fontsize=FONT + 1)
    for spine in axes.spines.values():
        spine.set_edgecolor(theme.ink)


def _label(axis: Any, labels: Labels, inches: float) -> None:
    """Set ticks for as many tokens as there is room for."""
    axis.set_label_text(labels.name)
    count = len(labels.texts)
    step = _step(LINE * count / inches)
    places = range(0, count, step)
    axis.set_ticks(places, [labels.texts[place] for place in places], parse_math=False)  # "$" is a token
    if axis.axis_name == "x" and labels.inches + LETTER > inches * step / count:
        axis.set_tick_params(rotation=90)


def _step(least: float) -> int:
    """Return the first of 1, 2, 5, 10, 20, 50 and so on that is not below `least`."""
    power = 1
    while 10 * power < least:
        power *= 10
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least)


def _shorten(token: str) -> str:
    """Return a token as one line: without control characters, and cut if it is too long."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in token)
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
