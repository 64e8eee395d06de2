"""A figure of matplotlib that a notebook shows, with `%matplotlib inline` or without."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A Figure that draws itself as an SVG. Jupyter shows only what has such a method.

    The SVG is transparent, so that it suits the notebook. A file has a background, so that its text can be read
    everywhere.
    """

    def __init__(self, size: tuple[float, float], paper: str) -> None:
        super().__init__(figsize=size, layout="constrained", facecolor="none")
        self.paper = paper

    def __repr__(self) -> str:
        width, height = self.bbox.size
        return f"<Figure size {width:.0f}x{height:.0f} with {len(self.axes)} Axes>"

    def savefig(self, fname: Any, *, transparent: bool | None = None, **keywords: Any) -> None:
        """Save the figure as Matplotlib does, on the background of its theme unless it is `transparent`."""
        if not transparent:
            keywords.setdefault("facecolor", self.paper)
        super().savefig(fname, transparent=transparent, **keywords)

    def _repr_svg_(self) -> str:
        buffer = io.StringIO()
        self.savefig(buffer, format="svg", transparent=True)
        return buffer.getvalue()
