"""A mask of blocks: which blocks of queries attend to which blocks of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .._checks import shown
from .._checks.integers import as_lists, exceeds
from .._checks.keywords import check_block_size, explains_keywords
from .._checks.score_arrays import THE_BATCH, check_broadcasts
from .._libraries import is_array
from .._libraries.protocols import AnyArray, Array, Shape
from .._tiles import Allowed, Tile
from .._tiles.grid import CallGrid
from ..errors import ArgumentTypeError, ArgumentValueError
from .algebra import FormulaPattern, Mask, Pattern
from .tables import joined, nested_shape, rows_of_tables, with_rows

Row = tuple[bool, ...]
Table = tuple[Row, ...]


@explains_keywords
def blocks(table: Sequence[Sequence[Any]] | AnyArray, size: int | tuple[int, int] | None = None) -> Mask:
    """Return a mask of blocks: query i attends to key j if table[i // size, j // size] is True.

        table  1 0    size 2   1 1 0 0
               1 1             1 1 0 0
                               1 1 1 1
                               1 1 1 1

    Args:
        table: Booleans (rows, columns), (Hq, rows, columns) with a table for each query head, or
            (..., Hq, rows, columns) with tables for each batch entry, where Hq may be 1: nested lists or a
            boolean array.
        size: The tokens of a block, or its (queries, keys); the last block may be shorter. None
            divides the L queries and the S keys equally, rounded up; on a GPU, sequences of unlike lengths need
            a number. In a cache, i and j count its tokens.

    Returns:
        The mask. Tiles in which no block attends are skipped.

    Raises:
        TypeError: `table` does not hold booleans, or is not known inside a jit, or `size` is not an integer.
        ValueError: `table` is empty or not rectangular, `size` is below 1, the blocks do not cover the queries
            and keys, one of them is empty, or the tables do not fit the heads or the batch.

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
    rule = "`table` must hold booleans, (rows, columns) or (..., Hq, rows, columns)"
    lists = as_lists(table)
    if is_array(lists):
        hint = "Pass nested lists, or an array that is made outside of the jit."
        raise ArgumentTypeError("blocks", "`table` must have known values", {"table": shown(table)}, hint)
    shape = nested_shape(lists)
    if len(shape) < 2 or 0 in shape:
        raise ArgumentValueError("blocks", rule, {"table": shown(lists), "its shape": shape})

    def booleans(name: str, row: Sequence[Any]) -> Row:
        for n, element in enumerate(row):
            if type(element).__name__ != "bool":  # Python's or NumPy's
                raise ArgumentTypeError("blocks", rule, {f"{name}[{n}]": repr(element)})
        return (*map(bool, row),)

    tables = with_rows("blocks", "table", lists, shape, booleans)
    tables = tables if len(shape) > 2 else (tables,)
    return Blocks(tables, None if size is None else check_block_size("blocks", size, "size"))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Blocks(Mask):
    """Made by `blocks`."""

    name = "blocks"
    counts = "slots"
    table: tuple[Any, ...]
    size: tuple[int, int] | None = None

    def bind(self, grid: CallGrid) -> Pattern:
        *batch, heads, rows, columns = nested_shape(self.table)
        if heads not in (1, grid.heads):
            rule = "`attn_mask.table` must have one table, or one for each query head (Hq)"
            raise ArgumentValueError(grid.function, rule, {"tables": heads, "Hq": grid.heads})
        check_broadcasts(grid.function, "attn_mask.table", (*batch,), grid.batch, THE_BATCH)
        if self.size is None and grid.padding is not None:
            rule = "`attn_mask.size` must be a number if sequences of unlike lengths are computed together"
            raise ArgumentValueError(grid.function, rule, {"attn_mask.size": None})
        queries, keys = grid.lengths("attn_mask.table")  # a graph with a cache is refused
        sizes = (self._size(grid, 0, "L", queries, rows), self._size(grid, 1, "S", keys, columns))
        count, tables = math.prod(batch), joined(self.table, len(batch) + 1)
        entries = grid.entry_numbers(count)
        tables = [table for n in entries for table in tables[n * heads : (n + 1) * heads]]
        shape = (*batch, heads) if len(entries) == count else (len(entries), heads)
        array = grid.xp.reshape(grid.put(joined(tables, 3), grid.xp.bool), (len(tables) * rows, columns))
        return BlockPattern(array, (*tables,), shape, grid.heads, *sizes)

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
class BlockPattern(FormulaPattern):
    """A pair may attend iff the table is True for its blocks."""

    array_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {"array": (None, None)}
    array: Array
    """The rows of all tables, one behind the other."""
    tables: tuple[Table, ...]
    shape: Shape
    """The lengths of the axes (..., h) that have tables of their own; 1 is one for all."""
    heads: int
    """Query heads."""
    rows: int
    """The queries of a block."""
    columns: int
    """The keys of a block."""

    def formula(self, tile: Tile) -> Allowed:
        xp, row, column = tile.grid.xp, tile.query_index // self.rows, tile.key_index // self.columns
        numbers = rows_of_tables(tile, row, self.shape, len(self.tables[0]), self.heads)
        if row.ndim == column.ndim == 2:
            of_rows = xp.take(self.array, xp.reshape(numbers, (-1,)), axis=0)
            of_rows = xp.reshape(of_rows, (*numbers.shape[:-1], self.array.shape[-1]))
            return xp.take(of_rows, xp.reshape(column, (-1,)), axis=-1)
        # Batch entries have positions of their own: each pair is looked up.
        index = numbers * self.array.shape[-1] + column
        return xp.reshape(xp.take(xp.reshape(self.array, (-1,)), xp.reshape(index, (-1,)), axis=0), index.shape)

    def uniform(self, tile: Tile) -> bool | None:
        if tile.positions is not None or tile.grid.placement is not None:
            return None
        columns = self._columns(tile)
        # Of the tables of Python's booleans, not of the array, so that no device is waited for.
        rows = [row[columns.start : columns.stop] for row in self._rows(tile)]
        if not any(True in row for row in rows):
            return False
        return None if any(False in row for row in rows) else True

    @property
    def is_shared(self) -> bool:
        return len(self.tables) == 1

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
        """Return the rows of the tables that are for the batch entries, heads and queries of the tile."""
        numbers, leading = [0], tile.leading or ()
        for n, length in enumerate(self.shape, start=len(leading) - len(self.shape)):
            of_axis = range(length) if length == 1 or not leading else leading[n]
            numbers = [number * length + index for number in numbers for index in of_axis]
        first, last = tile.first_position // self.rows, tile.last_position // self.rows
        return [row for number in numbers for row in self.tables[number][max(first, 0) : last + 1]]

    def _columns(self, tile: Tile) -> range:
        """Return the blocks of the tile's keys."""
        stop = min(-(-tile.columns.stop // self.columns), self.array.shape[-1])
        return range(tile.columns.start // self.columns, stop)
