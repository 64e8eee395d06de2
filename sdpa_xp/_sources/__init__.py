"""Keys and values that are no array of a call: blocks of a paged cache, and small integers (`quantised`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._libraries import library_of
from .._libraries.protocols import Array
from .._tiles import KeyValueSource, LeadingSlice


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
