"""A grid of coloured squares as an SVG."""

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
