"""Figures of a page as text: inline SVG, drawn once for a light page and once for a dark one."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from itertools import count
from typing import Any

import matplotlib

NUMBERS = count(1)
HIDDEN = 'aria-hidden="true" data-search-exclude=""'
"""What hides the text of a picture, such as its tick labels, from screen readers and from the search."""


def figure(draw: Callable[..., Any], *args: Any, alt: str, **keywords: Any) -> str:
    """Return HTML with `draw(*args, **keywords, theme=...)` for both colour schemes; `alt` describes it."""
    pictures = (
        f'<div class="figure figure-{theme}" role="img" aria-label="{escape(alt, quote=True)}">'
        f"{inline(draw(*args, **keywords, theme=theme))}</div>"
        for theme in ("light", "dark")
    )
    return "".join(pictures)


def inline(picture: Any) -> str:
    """Return a Matplotlib figure as an <svg> with ids that no other figure of the page has."""
    prefix = f"figure{next(NUMBERS)}-"
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        metadata = {"Date": None, "Creator": None}
        picture.savefig(buffer, format="svg", bbox_inches="tight", facecolor="none", metadata=metadata)
    svg = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    return re.sub(r"\n\s*", " ", svg).replace("<svg", f"<svg {HIDDEN}", 1)
