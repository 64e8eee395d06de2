"""A mask of blocks: which blocks of queries attend to which blocks of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from .._checks.integers import as_lists, exceeds
from .._checks.keywords import check_block_size, explains_keywords
from .._checks.messages import shown
from .._libraries import is_array
from .._libraries.protocols import AnyArray, Array
from .._tiles.grid import CallGrid
from .._tiles.tile import Allowed, Tile
from ..errors import ArgumentTypeError, ArgumentValueError
from .algebra import Mask
from .patterns import Pattern

Row = tuple[bool, ...]
Table = tuple[Row, ...]


@explains_keywords
def blocks(table: Sequence[Sequence[object]] | AnyArray, size: int | tuple[int, int] | None = None) -> Mask:
    """Return a mask of blocks: query i attends to key j if table[i // size, j // size] is True.

        table  1 0    size 2   1 1 0 0
               1 1             1 1 0 0
                               1 1 1 1
                               1 1 1 1

    Args:
        table: Booleans (rows, columns), or (Hq, rows, columns) with a table for each query head: nested lists
            or a boolean array.
        size: The tokens of a block, or its (queries, keys); the last block may be shorter. None
            divides the L queries and the S keys equally, rounded up. In a cache, i and j count its tokens.

    Returns:
        The mask. Tiles in which no block attends are skipped.

    Raises:
        TypeError: `table` does not hold booleans, or is not known inside a jit, or `size` is not an integer.
        ValueError: `table` is empty or not rectangular, `size` is below 1, the blocks do not cover the queries
            and keys, one of them is empty, or there is not one table for each head.

    Examples:
        >>> from sdpa_xp import masks
        >>> mask = masks.blocks([[True, False], [True, True]], size=2)
        >>> masks.to_array(mask & masks.causal(), (4, 4)).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])

    References:
        Dong et al., "Flex Attention", arXiv 2412.05496, section 3.2, BlockMask. Zaheer et al., "Big Bird",
        arXiv 2007.14062, section 2.
    """
    tables = _tables(table)
    return Blocks(tables, None if size is None else check_block_size("blocks", size, "size"))


def _tables(table: object) -> tuple[Table, ...]:
    """Check the table, and return one for each head, or one for all."""
    rule = "`table` must hold booleans, (rows, columns) or (Hq, rows, columns)"
    table = as_lists(table)
    if is_array(table):
        hint = "Pass nested lists, or an array that is made outside of the jit."
        raise ArgumentTypeError("blocks", "`table` must have known values", {"table": shown(table)}, hint)
    shape, inner = [], table
    while isinstance(inner, tuple | list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    if len(shape) not in (2, 3) or 0 in shape:
        raise ArgumentValueError("blocks", rule, {"table": shown(table), "its shape": tuple(shape)})
    heads = cast(Any, table if len(shape) == 3 else [table])
    for head in heads:
        rows = head if isinstance(head, tuple | list) else [head]
        for row in rows:
            if not isinstance(row, tuple | list) or (len(rows), len(row)) != (shape[-2], shape[-1]):
                rule = "`table` must have rows of one length, and tables of one size"
                raise ArgumentValueError("blocks", rule, {"a row": repr(row), "its shape": tuple(shape)})
            for element in row:
                if type(element).__name__ != "bool":  # Python's or NumPy's
                    raise ArgumentTypeError("blocks", rule, {"an element of table": repr(element)})
    return tuple(tuple(tuple(map(bool, row)) for row in head) for head in heads)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Blocks(Mask):
    """Made by `blocks`."""

    name = "blocks"
    counts = "slots"
    table: tuple[Table, ...]
    size: tuple[int, int] | None = None

    def bind(self, grid: CallGrid) -> Pattern:
        heads, rows, columns = len(self.table), len(self.table[0]), len(self.table[0][0])
        if heads not in (1, grid.heads):
            rule = "`attn_mask.table` must have one table, or one for each query head (Hq)"
            raise ArgumentValueError(grid.function, rule, {"tables": heads, "Hq": grid.heads})
        queries, keys = grid.lengths("attn_mask.table")  # a graph with a cache is refused
        sizes = (self._size(grid, 0, "L", queries, rows), self._size(grid, 1, "S", keys, columns))
        flat = [element for table in self.table for row in table for element in row]
        array = grid.xp.reshape(grid.put(flat, grid.xp.bool), (heads, rows, columns))
        return BlockPattern(array, self.table, *sizes)

    def _size(self, grid: CallGrid, axis: int, letter: str, length: int, count: int) -> int:
        """Return the tokens of a block; check that the blocks cover all tokens, and that none is empty."""
        if self.size is None and grid.placement is not None:
            return -(-length // count)  # a program for all lengths cannot ask whether a block is empty
        size = max(1, -(-length // count)) if self.size is None else self.size[axis]
        is_beyond = exceeds(grid.function, "attn_mask.table", length, size * count)
        if is_beyond or (self.size is None and 0 < -(-length // size) < count):
            rule = f"`attn_mask.table` must divide the {letter} tokens into blocks"
            got = {letter: length, "blocks": count, "attn_mask.size": size}
            raise ArgumentValueError(grid.function, rule, got)
        return size


@dataclass(frozen=True, slots=True, eq=False)
class BlockPattern(Pattern):
    """A pair may attend iff the table is True for its blocks."""

    array_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {"array": (-3, None, None)}
    array: Array
    """(heads, rows, columns); heads is 1 for all of them."""
    table: tuple[Table, ...]
    rows: int
    """The queries of a block."""
    columns: int
    """The keys of a block."""

    def allowed_in(self, tile: Tile) -> Allowed:
        answer = self.uniform(tile)
        if answer is not None:
            return answer
        xp, array = tile.grid.xp, self.array if self.array.shape[0] == 1 else tile.slice_heads(self.array)
        row, column = tile.query_index // self.rows, tile.key_index // self.columns
        if row.ndim == column.ndim == 2:
            array = xp.take(array, xp.reshape(row, (-1,)), axis=-2)
            return xp.take(array, xp.reshape(column, (-1,)), axis=-1)
        # Batch entries have positions of their own: each pair is looked up.
        index = row * self.array.shape[2] + column
        if self.array.shape[0] > 1:
            index = index + tile.slice_heads(tile.grid.head_index()) * math.prod(self.array.shape[1:])
        return xp.reshape(xp.take(xp.reshape(self.array, (-1,)), xp.reshape(index, (-1,)), axis=0), index.shape)

    def uniform(self, tile: Tile) -> bool | None:
        if tile.positions is not None or tile.grid.placement is not None:
            return None
        columns = self._columns(tile)
        # Of the table of Python's booleans, not of the array, so that no device is waited for.
        answers = {element for row in self._rows(tile) for element in row[columns.start : columns.stop]}
        return None if len(answers) == 2 else True in answers

    @property
    def is_shared(self) -> bool:
        return len(self.table) == 1

    def key_range(self, tile: Tile) -> range:
        if tile.positions is not None or tile.grid.placement is not None:
            return tile.columns
        rows = self._rows(tile)  # none, if there are no queries
        among = [block for block in self._columns(tile) if any(row[block] for row in rows)]
        if not among:
            return range(0)
        start, stop = among[0] * self.columns, (among[-1] + 1) * self.columns
        return range(max(start, tile.columns.start), min(stop, tile.columns.stop))

    def _rows(self, tile: Tile) -> list[Row]:
        """Return the rows of the tables that are for the heads and queries of the tile."""
        tables = self.table
        if len(tables) > 1 and tile.leading is not None:
            heads = tile.leading[-1]
            tables = tables[heads.start : heads.stop]
        first, last = tile.first_position // self.rows, tile.last_position // self.rows
        return [row for table in tables for row in table[max(first, 0) : last + 1]]

    def _columns(self, tile: Tile) -> range:
        """Return the blocks of the tile's keys."""
        stop = min(-(-tile.columns.stop // self.columns), len(self.table[0][0]))
        return range(tile.columns.start // self.columns, stop)
