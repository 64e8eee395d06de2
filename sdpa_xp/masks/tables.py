"""Tables of batch entries and heads: nested lists, and where the rows of a tile stand if all are one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .._checks import shown
from .._libraries.protocols import Array, Shape
from .._tiles import Tile
from ..errors import ArgumentValueError

T = TypeVar("T")


def nested_shape(value: object) -> Shape:
    """Return the lengths of nested lists, each by the first list of its depth."""
    if not isinstance(value, tuple | list):
        return ()
    return (len(value), *(nested_shape(value[0]) if value else ()))


def with_rows(
    function: str, name: str, value: Any, shape: Shape, change: Callable[[str, Sequence[Any]], T]
) -> T | tuple[Any, ...]:
    """Return nested lists of a shape as tuples, with `change(name, row)` in place of each row."""
    if not isinstance(value, tuple | list) or len(value) != shape[0]:
        rule = f"`{name}` must be a list as long as the others of its depth"
        raise ArgumentValueError(function, rule, {name: shown(value), "length": shape[0]})
    if len(shape) == 1:
        return change(name, value)
    return tuple(with_rows(function, f"{name}[{n}]", x, shape[1:], change) for n, x in enumerate(value))


def joined(value: Any, depth: int) -> list[Any]:
    """Return the elements of nested lists, `depth` lists deep, in one list."""
    elements = [*value]
    for _ in range(depth - 1):
        elements = [inner for outer in elements for inner in outer]
    return elements


def rows_of_tables(tile: Tile, index: Array, shape: Shape, rows: int, heads: int) -> Array:
    """Return where the rows `index` of the tables of a tile stand among the rows of all tables.

    There are tables for the axes (..., h) of `shape`, one behind the other, of `rows` each. h divides the
    query `heads`, and each is for consecutive ones.
    """
    for axis in range(-1, -1 - len(shape), -1):
        if shape[axis] != 1:
            group = heads // shape[-1] if axis == -1 else 1
            first, last = 0, shape[axis] * group  # no `range`: a length may be a symbol of a compiler
            if tile.leading is not None:
                first, last = tile.leading[axis].start, tile.leading[axis].stop
            number = tile.grid.arange(first, last) // group * rows
            index = index + tile.grid.in_all_axes(tile.grid.xp.reshape(number, (-1, *[1] * (1 - axis))))
        rows *= shape[axis]
    return index
