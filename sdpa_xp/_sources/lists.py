"""Keys and values that are listed for each block of queries, and copied tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

from .._libraries import namespace_of
from .._libraries.protocols import Array, Namespace
from .._tiles.tile import LeadingSlice, slice_leading
from . import KeyValueSource


@dataclass(frozen=True, slots=True, eq=False)
class ListedSource(KeyValueSource):
    """Keys or values of one array (..., H, S, width), read as (..., H, blocks, m, width)."""

    array: Array
    tokens: Array
    """Those of each block, (blocks, m)."""

    @property
    def width(self) -> int:
        return self.array.shape[-1]

    @property
    def heads(self) -> int:
        return self.tokens.shape[0]

    def slice_leading(self, leading: LeadingSlice) -> ListedSource:
        *others, blocks = leading
        return ListedSource(slice_leading(self.array, (*others,)), self.tokens[blocks.start : blocks.stop, :])

    def slice_keys(self, columns: range) -> Array:
        return in_blocks(namespace_of(self.array), self.array, self.tokens[:, columns.start : columns.stop])


def in_blocks(xp: Namespace, array: Array, tokens: Array) -> Array:
    """Return tokens of an array (..., H, S, width) as (..., H, blocks, n, width)."""
    copied = xp.take(array, xp.reshape(tokens, (-1,)), axis=-2)
    return xp.reshape(copied, (*array.shape[:-2], *tokens.shape, array.shape[-1]))
