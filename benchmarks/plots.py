"""Pictures of the results, for a light page and a dark one: grey ink, no background, a colour for each library.

Colours are Okabe and Ito's, "Color universal design", 2008, without the two that vanish on white, and three
of Brewer's "Dark2" where a library has more lines. Lines of sdpa_xp are solid and the others are dashed, so
that no line depends on its colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from bars import LIMIT, MEMORY, TO_TORCH
from contenders import CONTENDERS, LOOP, MATMULS
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from measuring import Row

INK = "#7a7a7a"
COLOURS = {
    "NumPy": "#0072b2",
    "a bare loop": "#66a61e",
    "matmuls": "#999999",
    "torch, portable": "#7570b3",
    "sdpa_xp on torch": "#a6761d",
    "torch": "#d55e00",
    "jax": "#009e73",
    "JAX": "#009e73",
    "onnxruntime": "#cc79a7",
}
MARKERS = "os.vD^ps<>*hX"
STYLE = {
    "svg.hashsalt": "sdpa_xp",  # ids that are the same in every run
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


class Plot(NamedTuple):
    """A quantity over S, with one panel for each cell."""

    cells: tuple[str, ...]
    quantity: str
    label: str
    line: float | None = None
    """The height of a horizontal line: the value of a contender that equals the one it is compared with."""
    is_log: bool = True
    left_out: tuple[str, ...] = ()


PLOTS = {
    "time": Plot(("all pairs", "causal"), "milliseconds", "milliseconds"),
    "ratio": Plot(
        ("all pairs", "causal"), TO_TORCH, "time over that of torch SDPA", 1.0, left_out=(MATMULS, LOOP)
    ),
    "limit": Plot(("all pairs",), LIMIT, "time of the matmuls alone over the whole", 1.0, False, (MATMULS,)),
    "memory": Plot(("memory",), MEMORY, "MB above inputs and output"),
}


def draw(rows: Sequence[Row], folder: Path) -> list[str]:
    """Write each plot that has data; return the names."""
    pictures = {name: figure(rows, plot) for name, plot in PLOTS.items()}
    with matplotlib.rc_context(STYLE):
        for name, picture in pictures.items():
            if picture is not None:
                picture.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    return [name for name, picture in pictures.items() if picture is not None]


def figure(rows: Sequence[Row], plot: Plot) -> Figure | None:
    """Return the figure, or None if it has no data."""
    with_data = [
        row
        for row in rows
        if row.cell in plot.cells and plot.quantity in row.numbers and row.contender not in plot.left_out
    ]
    if not with_data:
        return None
    with matplotlib.rc_context(STYLE):
        width = 3.6 * len(plot.cells) + 2.4
        picture = Figure(figsize=(width, 3.6), layout="constrained")
        panels = picture.subplots(1, len(plot.cells), sharey=True, squeeze=False)[0]
        lines: dict[str, Any] = {}
        for axes, cell in zip(panels, plot.cells, strict=True):
            lines |= _panel(axes, plot, [row for row in with_data if row.cell == cell])
            axes.set_title(cell, color=INK)
        panels[0].set_ylabel(plot.label)
        picture.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False)
    return picture


GLANCE = (
    ("NumPy", "sdpa_xp on NumPy", "sdpa_xp on NumPy"),
    ("torch", "sdpa_xp on torch", "sdpa_xp on torch"),
    ("torch", "torch SDPA", "torch SDPA"),
    ("JAX", "sdpa_xp on JAX, jitted", "sdpa_xp on JAX, jitted"),
    ("jax", "jax.nn, jitted", "jax.nn, jitted"),
    ("onnxruntime", "onnxruntime, MultiHeadAttention", "onnxruntime, GroupQueryAttention"),
)
"""What the picture of the first glance compares: a colour, and who was measured for all pairs and causal."""


def at_a_glance(rows: Sequence[Row], length: int = 4096) -> Figure:
    """Return bars of the milliseconds on each library, faint for the libraries' own functions."""
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        picture = Figure(figsize=(8.4, 2.6), layout="constrained")
        panels = picture.subplots(1, 2, sharey=True)
        for axes, cell, place in zip(panels, ("all pairs", "causal"), (1, 2), strict=True):
            for height, names in enumerate(reversed(GLANCE)):
                (row,) = (
                    row for row in rows if (row.cell, row.length, row.contender) == (cell, length, names[place])
                )
                time = row.numbers["milliseconds"].median
                ours = not names[1].startswith(("torch", "jax"))
                axes.barh(height, time, color=COLOURS[names[0]], alpha=1 if ours else 0.45)
                axes.bar_label(axes.containers[-1], [f"{time:,.0f}"], padding=3, color=INK)
            axes.set_title(f"{cell}, milliseconds", color=INK)
            axes.set_yticks(
                range(len(GLANCE)),
                [names[1].replace(", MultiHeadAttention", ", exported") for names in reversed(GLANCE)],
            )
            axes.margins(x=0.15)
    return picture


def _panel(axes: Any, plot: Plot, rows: Sequence[Row]) -> dict[str, Any]:
    """Draw a panel; return the line of each contender by its name."""
    lengths = sorted({row.length for row in rows})
    axes.set_xscale("log", base=2)
    if plot.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("S")
    if plot.line is not None:
        axes.axhline(plot.line, color=INK, linewidth=1)
    return {
        name: _line(axes, index, name, plot.quantity, of_name)
        for index, name in enumerate(CONTENDERS)
        if (of_name := [row for row in rows if row.contender == name])
    }


def _line(axes: Any, index: int, name: str, quantity: str, rows: Sequence[Row]) -> Any:
    """Draw medians as a line, with the quartiles as bars."""
    spreads = [row.numbers[quantity] for row in rows]
    ours = name.startswith("sdpa_xp")
    return axes.errorbar(
        [row.length for row in rows],
        [spread.median for spread in spreads],
        [
            [spread.median - spread.low for spread in spreads],
            [spread.high - spread.median for spread in spreads],
        ],
        color=next(colour for library, colour in COLOURS.items() if library in name),
        marker=MARKERS[index],
        markersize=5,
        markerfacecolor=None if ours else "none",
        linestyle="-" if ours else "--",
        linewidth=1.6 if ours else 1.1,
    )
