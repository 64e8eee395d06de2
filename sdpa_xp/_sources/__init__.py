"""The keys and values of a call: an array, or blocks of a paged cache. They are read tile by tile.

Keys and values are not copied for the query heads that share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from .._libraries import astype_if_needed, library_of
from .._libraries.protocols import Array
from .._tiles import LeadingSlice, slice_leading
from .._tiles.grid import FAR, ScoreGrid

FactoredSlices: TypeAlias = tuple[Callable[[range], Array], Callable[[range], Array] | None]
"""What `KeyValueSource.factored_slices` returns."""


class KeyValueSource(Protocol):
    """The keys or the values of a call. They are read tile by tile, and all of them are never one copy."""

    __slots__ = ()

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    def slice_leading(self, leading: LeadingSlice) -> KeyValueSource:
        """Return the part for some batch entries and heads, (..., H)."""

    def slice_keys(self, columns: range) -> Array:
        """Return (..., H, columns, width)."""

    def slices(self, grid: ScoreGrid, *, transposed: bool = False) -> Callable[[range], Array]:
        """Return a function of `columns`, which returns them in the dtype of the grid, or also transposed.

        What does not depend on the columns is done once. Here each tile is copied or converted.
        """
        xp, dtype = grid.xp, grid.dtype
        if transposed:
            return lambda columns: xp.matrix_transpose(astype_if_needed(xp, self.slice_keys(columns), dtype))
        return lambda columns: astype_if_needed(xp, self.slice_keys(columns), dtype)

    def factored_slices(self, grid: ScoreGrid, *, transposed: bool = False) -> FactoredSlices:
        """Return `slices` without a factor of each key, and a function of `columns` that returns the factors.

        The factors are (..., H, 1, columns); None in place of their function is 1, as here.
        """
        return self.slices(grid, transposed=transposed), None


@dataclass(frozen=True, slots=True, eq=False)
class ArraySource(KeyValueSource):
    """One array, (..., H, S, width)."""

    array: Array

    @property
    def width(self) -> int:
        return self.array.shape[-1]

    @property
    def heads(self) -> int:
        return self.array.shape[-3]

    def slice_leading(self, leading: LeadingSlice) -> ArraySource:
        return ArraySource(slice_leading(self.array, leading))

    def slice_keys(self, columns: range) -> Array:
        array = self.array
        is_whole = columns.stop == FAR or columns.stop - columns.start == array.shape[-2]
        return array if is_whole else array[..., columns.start : columns.stop, :]

    def slices(self, grid: ScoreGrid, *, transposed: bool = False) -> Callable[[range], Array]:
        if self.array.dtype != grid.dtype:  # tile by tile, so that no wide copy of all keys exists
            return KeyValueSource.slices(self, grid, transposed=transposed)
        if not transposed:
            return self.slice_keys
        array = grid.xp.matrix_transpose(self.array)
        whole = range(self.array.shape[-2]) if grid.placement is None else range(FAR)
        # The whole array needs no slice, which would be an operation in a graph.
        return lambda columns: array if columns == whole else array[..., columns.start : columns.stop]


@dataclass(frozen=True, slots=True, eq=False)
class PagedSource(KeyValueSource):
    """Blocks of a pool (blocks, H, size, width), for n sequences of equal lengths."""

    pool: Array
    block_tables: Sequence[Sequence[int]] | Array
    """The blocks of each sequence, in order; on a device an int32 array (n, blocks)."""

    @property
    def width(self) -> int:
        return self.pool.shape[-1]

    @property
    def heads(self) -> int:
        return self.pool.shape[-3]

    def slice_leading(self, leading: LeadingSlice) -> PagedSource:
        sequences, heads = leading
        return PagedSource(
            self.pool[:, heads.start : heads.stop, ...], self.block_tables[sequences.start : sequences.stop]
        )

    def slice_keys(self, columns: range) -> Array:
        """Return (n, H, columns, width): a view of one block, or a copy of several."""
        size = self.pool.shape[-2]
        first, start = divmod(columns.start, size)
        stop = start + len(columns)
        last = -(-columns.stop // size)
        tables: Any
        if not isinstance(self.block_tables, Sequence):
            tables = self.block_tables[:, first:last]
        else:
            tables = [row[first:last] for row in self.block_tables]
            if len(tables) == len(tables[0]) == 1:
                return self.pool[tables[0][0] : tables[0][0] + 1, :, start:stop, :]
        copied: Array = library_of(self.pool).in_blocks(self.pool, tables)
        return copied[..., start:stop, :]
