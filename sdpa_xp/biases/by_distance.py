"""Biases that depend on the distance j - i alone: a tile has one number for each of its diagonals."""

from __future__ import annotations

from abc import abstractmethod

from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.allowed import Allowed, is_masked
from sdpa_xp._tiles.tile import Tile
from sdpa_xp.biases.algebra import Added


class AddedByDistance(Added):
    """A term that adds a function of j - i.

    Where the library has views with any strides, the function is computed once for each diagonal of a tile, and
    not for each of its pairs.
    """

    @abstractmethod
    def at_distances(self, tile: Tile, distances: Array, /) -> Array:
        """Return what is added at some `distances` j - i, int32 (rows, n): (..., Hq, rows, n)."""

    def added(self, tile: Tile) -> Array:
        if not _has_diagonals(tile):
            return self.at_distances(tile, tile.key_index - tile.query_index)
        first = tile.columns.start - tile.last_position
        distances = tile.grid.arange(first, first + len(tile.rows) + len(tile.columns) - 1)
        numbers = self.at_distances(tile, tile.grid.xp.expand_dims(distances, axis=0))
        return tile.grid.library.diagonals(numbers, len(tile.columns))

    def unmasked(self, tile: Tile, added: Array) -> Allowed:
        # Each diagonal begins in the first row or in the first column, so the other pairs need not be read.
        edges = added[..., :1, :], added[..., :1]
        if _has_diagonals(tile) and not any(bool(tile.grid.xp.any(is_masked(edge))) for edge in edges):
            return True
        return super().unmasked(tile, added)


def _has_diagonals(tile: Tile) -> bool:
    """Return whether all distances of a tile are known, and its diagonals can be a view."""
    return tile.grid.library.has_diagonals and tile.block is None and tile.placement is None
