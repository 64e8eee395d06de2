"""How values show themselves in a notebook, which calls `_repr_html_`: pictures of squares, and tables.

Nothing here needs matplotlib, and the colours suit a light page and a dark one. `samples` has the squares of
masks and biases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

SIDE = 168
"""The length of the longer side in pixels, as far as whole pixels for a square allow."""
SMALLEST, LARGEST = 3, 14
"""The side of a square in pixels."""


class Squares(NamedTuple):
    """Rows of squares; a character stands for a colour."""

    rows: Sequence[str]
    colours: Mapping[str, str]
    """By character, a colour of CSS. Characters that are not among them stay empty."""
    title: str
    """What is seen, for those who cannot see it."""
    label: str = ""
    """Shown below the picture."""

    def svg(self) -> str:
        """Return the SVG. Each colour is one path."""
        columns = max(map(len, self.rows), default=0)
        side = max(SMALLEST, min(LARGEST, SIDE // max(columns, len(self.rows), 1)))
        width, height = side * columns, side * len(self.rows)
        paths: dict[str, list[str]] = {}
        for number, row in enumerate(self.rows):
            start = 0
            for letter, group in groupby(row):
                count = len([*group])
                if letter in self.colours:
                    line = f"M{start * side} {number * side}h{count * side}v{side}h-{count * side}z"
                    paths.setdefault(letter, []).append(line)
                start += count
        shapes = [f'<path fill="{self.colours[x]}" d="{"".join(lines)}"/>' for x, lines in paths.items()]
        frame = f'<rect width="{width}" height="{height}" fill="none" stroke="currentColor" opacity="0.5"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(self.title, quote=True)}" '
            f'width="{width + 2}" height="{height + 2}" viewBox="-1 -1 {width + 2} {height + 2}">'
            f"{''.join(shapes)}{frame}</svg>"
        )


def captioned(text: str, pictures: Iterable[Squares], note: str = "") -> str:
    """Return pictures side by side below lines of code, with a note below them."""
    drawn = "".join(_labelled(picture) for picture in pictures)
    small = f'<div style="font-size: 0.85em">{escape(note)}</div>' if note else ""
    code = "<br/>".join(f"<code>{escape(line)}</code>" for line in text.splitlines())
    return f"<div><div>{code}</div><div>{drawn}</div>{small}</div>"


def _labelled(picture: Squares) -> str:
    """Return a picture with its label, if it has one, below it."""
    label = f'<div style="font-size: 0.85em">{escape(picture.label)}</div>' if picture.label else ""
    return f'<span style="display: inline-block; margin-right: 0.8em">{picture.svg()}{label}</span>'


def table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return a table; the first cell of a row is its name."""
    head = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr></thead>" if header else ""
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<div><div><code>{escape(title)}</code></div><table>{head}<tbody>{body}</tbody></table></div>"


def nested(title: str, items: Iterable[str]) -> str:
    """Return a heading that opens and closes, with items of HTML below it."""
    inner = "".join(f"<li>{item}</li>" for item in items)
    return f'<details open=""><summary><code>{escape(title)}</code></summary><ul>{inner}</ul></details>'
