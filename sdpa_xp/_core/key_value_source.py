"""Where the keys or values of a tile come from: one array, or the blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.tile import LeadingSlice, slice_leading


class KeyValueSource(Protocol):
    """The keys or the values of a call. They are read tile by tile, and never copied into one array."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    def slice_leading(self, leading: LeadingSlice) -> KeyValueSource:
        """Return the part for some batch entries and heads, (..., H)."""

    def slice_keys(self, columns: range) -> Array:
        """Return (..., H, columns, width)."""


class ArraySource(NamedTuple):
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
        is_whole = len(columns) == self.array.shape[-2]
        return self.array if is_whole else self.array[..., columns.start : columns.stop, :]


class PagedSource(NamedTuple):
    """Blocks of a pool (blocks, H, size, width) in the order of `block_table`; no tile crosses a border."""

    pool: Array
    block_table: Sequence[int]

    @property
    def width(self) -> int:
        return self.pool.shape[-1]

    @property
    def heads(self) -> int:
        return self.pool.shape[-3]

    def slice_leading(self, leading: LeadingSlice) -> PagedSource:
        return PagedSource(slice_leading(self.pool, leading), self.block_table)

    def slice_keys(self, columns: range) -> Array:
        size = self.pool.shape[-2]
        number, start = divmod(columns.start, size)
        return self.pool[self.block_table[number], :, start : start + len(columns), :]
