"""How values show themselves in a notebook, which calls `_repr_html_`: pictures of squares, and tables.

Nothing here needs matplotlib, and the colours suit a light page and a dark one. Masks and biases are drawn at a
few queries and keys, of a length that suits their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby, islice, product
from typing import Any, NamedTuple

from ._checks import brief, has_values
from ._libraries import computing, dtype_name, is_array, library_of, namespace_of
from ._libraries.protocols import Array, Shape
from ._tiles import Allowed, Tile
from ._tiles.grid import ScoreGrid, grid_of
from ._tiles.modifier import ScoreModifier

SIDE = 168
"""The length of the longer side in pixels, as far as whole pixels for a square allow."""
SMALLEST, LARGEST = 3, 14
"""The side of a square in pixels."""
CELLS = 32
"""The most squares of a side; longer masks are sampled."""
LEAST, MOST = 12, 4096
"""The length that is drawn, if no argument gives one: twice the largest number, within these limits."""
PANELS, MOST_HEADS = 4, 128
"""The most entries or heads that are drawn, and the most heads that a bias may have."""
ALLOWED, MASKED_OUT = "#2f86c5", "#d55e00"
SHADES = ("#2f86c522", "#2f86c555", "#2f86c588", "#2f86c5bb", "#2f86c5")
LENGTHS = ("key_lengths", "query_lengths", "length", "offset")
"""Arguments that have one number, or one for each batch entry."""


class Squares(NamedTuple):
    """Rows of squares; a character stands for a colour."""

    rows: Sequence[str]
    colours: Mapping[str, str]
    """By character, a colour of CSS. Characters that are not among them stay empty."""
    title: str
    """What is seen, for those who cannot see it."""
    label: str = ""
    """Shown above the picture."""

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
    return f"<div><div>{_lines_of_code(text)}</div><div>{drawn}</div>{small}</div>"


def _lines_of_code(text: str) -> str:
    # A repr may hold HTML's characters, as `<function ...>` does.
    return "<br/>".join(f"<code>{escape(line)}</code>" for line in text.splitlines())


def _labelled(picture: Squares) -> str:
    """Return a picture with its label, if it has one, above it."""
    label = f'<div style="font-size: 0.85em">{escape(picture.label)}</div>' if picture.label else ""
    return f'<span style="display: inline-block; margin-right: 0.8em">{label}{picture.svg()}</span>'


def array_facts(value: object, shape: Shape | None = None, dtype: str = "") -> str:
    """Return the shape, the library, the dtype and the device of an array, and the repr of anything else.

    Another `shape` and `dtype` are those that the array stands for.
    """
    if not is_array(value):  # in a tree of JAX, anything may stand where an array was
        return brief(value)
    library = namespace_of(value).__name__.removeprefix("array_api_compat.")
    shape, dtype = tuple(value.shape) if shape is None else shape, dtype or dtype_name(value.dtype)
    return f"{shape}, {library}, {dtype}, {library_of(value).device(value)}"


def table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return a table; the first cell of a row is its name."""
    head = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr></thead>" if header else ""
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    above = f"<div>{_lines_of_code(title)}</div>" if title else ""
    return f"<div>{above}<table>{head}<tbody>{body}</tbody></table></div>"


def nested(title: str, items: Iterable[str], *, is_open: bool = True) -> str:
    """Return a heading that opens and closes, with items of HTML below it."""
    inner = "".join(f"<li>{item}</li>" for item in items)
    return folded(title, f"<ul>{inner}</ul>", is_open=is_open)


def folded(title: str, inner: str, *, is_open: bool = True) -> str:
    """Return a heading that opens and closes, with HTML below it."""
    opened = ' open=""' if is_open else ""
    return f"<details{opened}><summary><code>{escape(title)}</code></summary>{inner}</details>"


def sampled_mask(mask: ScoreModifier, allowed_in: Callable[[Tile], Allowed]) -> str | None:
    """Return HTML with the pairs that a mask allows, or None if it cannot tell without a call."""

    def drawn(grid: ScoreGrid) -> tuple[list[Squares], str]:
        panels, title = _panels(grid), f"The pairs that {mask} allows"
        maps = _sampled(grid, panels, allowed_in)
        pictures = {place: _lines(rows, lambda cell: "#" if cell else ".") for place, rows in maps.items()}
        squares = [
            Squares(pictures[place], {"#": ALLOWED}, f"{title}, {label}" if label else title, label)
            for place, label in panels.items()
        ]
        return squares, "blue: may attend"

    return _shown(mask, drawn, [_shape(mask)])


def sampled_bias(bias: ScoreModifier, added_in: Callable[[Tile], Array]) -> str | None:
    """Return HTML with what a bias adds to the scores of its first heads, or None if it cannot tell.

    Each head has its own shades: the slopes of ALiBi's heads differ by so much that one scale would hide most.
    """

    def drawn(grid: ScoreGrid) -> tuple[list[Squares], str]:
        first = tuple(0 for _ in grid.batch)
        maps = _sampled(grid, [(*first, head) for head in range(min(grid.heads, PANELS))], added_in)
        panels = {place: [[*map(float, row)] for row in rows] for place, rows in maps.items()}
        others = {x for rows in panels.values() for row in rows for x in row if not math.isfinite(x)}
        legend = f"orange: {' or '.join(sorted({*map(str, others)}))}" if others else ""
        if len(panels) > 1:
            shades = "each head in its own shades, from its first number (blue) to its last (faint)"
            legend = "; ".join(filter(None, [shades, legend]))
        title = f"What {bias} adds to the scores"
        return [_shaded(rows, title, _place(grid, place)) for place, rows in panels.items()], legend

    shape = _shape(bias)
    shapes = [shape] if len(shape) > 2 else [(heads, *shape) for heads in _heads(bias)]
    return _shown(bias, drawn, shapes)


def _shaded(rows: list[list[float]], title: str, place: str) -> Squares:
    """Return a picture of numbers, with its largest and its least number in the label."""
    finite = [x for row in rows for x in row if math.isfinite(x)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    ends = [f"{number:.3g}" for number in sorted({low, high}, reverse=True)] if finite else []
    if place:
        label = ": ".join(filter(None, [place, " to ".join(ends)]))
    else:
        label = ", ".join(f"{shade}: {end}" for shade, end in zip(("blue", "faint"), ends, strict=False))
    colours = {str(number): shade for number, shade in enumerate(SHADES)} | {"x": MASKED_OUT}
    return Squares(_lines(rows, lambda x: _shade(x, low, high)), colours, f"{title}, {label}", label)


def _shown(
    value: ScoreModifier, drawn: Callable[[ScoreGrid], tuple[list[Squares], str]], shapes: Iterable[Shape]
) -> str | None:
    for shape in shapes:
        try:
            grid = grid_of("display", "value", shape, value.arrays(), None)
            if not all(has_values(array) for _, array in value.arrays()):  # none to draw inside of a jit
                return None
            with computing(next((array for _, array in value.arrays()), None)):
                pictures, legend = drawn(grid)
            note = f"{grid.queries} queries (down) x {grid.keys} keys"
            return captioned(str(value), pictures, "; ".join(filter(None, [legend, note])))
        except Exception:  # the shape is a guess, and a value that fits none still shows as text
            continue
    return None


def _sampled(
    grid: ScoreGrid, places: Iterable[Shape], computed: Callable[[Tile], Any]
) -> dict[Shape, list[list[Any]]]:
    """Return the cells of each place (batch, head), row by row. Each row is computed as a tile of one query."""
    maps: dict[Shape, list[list[Any]]] = {place: [] for place in places}
    columns = _places(grid.keys)
    for query in _places(grid.queries):
        tile = Tile(range(query, query + 1), range(grid.keys), grid)  # few rows, so that long masks are cheap
        result = computed(tile)  # of a mask also True or False
        row = None if isinstance(result, bool) else grid.xp.broadcast_to(result, tile.shape)
        for place, rows in maps.items():
            rows.append([result if row is None else row[(*place, 0, key)] for key in columns])
    return maps


def _lines(rows: Iterable[Iterable[Any]], letter: Callable[[Any], str]) -> list[str]:
    return ["".join(map(letter, row)) for row in rows]


def _panels(grid: ScoreGrid) -> dict[Shape, str]:
    """Return the index (batch, head) of each picture, with its label.

    They are the first batch entries, each with its first head; if there is one entry, the first heads.
    """
    heads = range(grid.heads if math.prod(grid.batch) == 1 else 1)
    places = islice(product(*map(range, grid.batch), heads), PANELS)
    return {place: _place(grid, place) for place in places}


def _place(grid: ScoreGrid, place: Shape) -> str:
    """Return the label of an index (batch, head); "" if there is only one entry with one head."""
    entries, number = math.prod(grid.batch), 0
    for index, length in zip(place[:-1], grid.batch, strict=True):
        number = number * length + index
    entry = f"entry {number} of {entries}" if entries > 1 else ""
    head = f"head {place[-1]} of {grid.heads}" if grid.heads > 1 else ""
    return ", ".join(filter(None, [entry, head]))


def _places(length: int) -> list[int]:
    count = min(length, CELLS)
    return [number * length // count for number in range(count)]


def _shape(value: ScoreModifier) -> Shape:
    """Return a shape, (L, S) or with a batch, that suits the arguments."""
    queries, keys, entries, largest, lower_right = 0, 0, 0, 0, False
    leading: Shape = ()
    for name, argument in _arguments(value):
        size = _size(argument)
        if name == "query_ids":
            queries = size
        elif name == "key_ids":
            keys = size
        elif name == "shape" and isinstance(argument, tuple):  # of places in space
            queries = keys = min(math.prod(argument), MOST)
        elif name == "parents":  # as many keys of context as the drafts leave room for
            queries, keys = size, max(size, LEAST)
        elif name == "table" and isinstance(argument, tuple):
            of_block = getattr(value, "size", None) or (2, 2)
            queries, keys = len(argument[0]) * of_block[0], len(argument[0][0]) * of_block[1]
            leading = (1, len(argument))
        elif name in ("boolean", "array") and is_array(argument):
            *leading_axes, queries, keys = (1, 1, *argument.shape)[-max(len(argument.shape), 2) :]
            leading = tuple(leading_axes)
        elif name in LENGTHS and size > 1:
            entries = size
        lower_right = lower_right or (isinstance(argument, str) and argument == "lower_right")
        largest = max([largest, *(abs(number) for number in _numbers(argument))])
    keys = next(n for n in (keys, queries, max(LEAST, min(2 * largest, MOST))) if n > 1)
    if queries < 2:
        queries = (keys + 1) // 2 if lower_right else keys
    return (*(leading or ((entries, 1) if entries else ())), queries, keys)


def _arguments(value: ScoreModifier) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a value, or those of all values that it is made of."""
    if value.parts:
        for part in value.parts:
            yield from _arguments(part)
    else:
        yield from value.arguments.items()


def _size(argument: Any) -> int:
    """Return how many numbers an argument has along its last axis; 0 for a single one."""
    if is_array(argument):
        return int(argument.shape[-1]) if argument.shape else 0
    return len(argument) if isinstance(argument, tuple) else 0


def _numbers(argument: Any) -> Iterator[int]:
    for number in argument if isinstance(argument, tuple) else (argument,):
        if isinstance(number, int) and not isinstance(number, bool):
            yield number


def _heads(bias: ScoreModifier) -> list[int]:
    """Return numbers of heads to try: those that an argument may mean, the largest first, then one."""
    counts = [1]
    for name, argument in _arguments(bias):
        counts += [*_numbers(argument), _size(argument) if name != "array" else 1]
    return sorted({heads for heads in counts if 0 < heads <= MOST_HEADS}, reverse=True)


def _shade(number: float, low: float, high: float) -> str:
    if not math.isfinite(number):
        return "x"
    return str(round((number - low) / (high - low) * (len(SHADES) - 1)) if high > low else len(SHADES) - 1)
