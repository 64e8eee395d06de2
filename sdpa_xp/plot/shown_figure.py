"""A figure of matplotlib that a notebook shows, with `%matplotlib inline` or without."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A Figure that draws itself as an SVG. Jupyter shows only what has such a method."""

    def _repr_svg_(self) -> str:
        """Return the drawing."""
        buffer = io.StringIO()
        self.savefig(buffer, format="svg")
        return buffer.getvalue()
