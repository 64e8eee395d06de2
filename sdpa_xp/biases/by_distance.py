"""Biases that depend on the distance j - i alone: all scores of a diagonal get the same number."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from sdpa_xp._libraries.protocols import Array
from sdpa_xp._tiles.allowed import Allowed, is_masked
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import Tile
from sdpa_xp.biases.algebra import Added, Term


class AddedByDistance(Added):
    """A term that adds a function of j - i."""

    @abstractmethod
    def at_distances(self, grid: ScoreGrid, distances: Array, /) -> Array:
        """Return what is added at n distances j - i, int32 (n,): (..., Hq, 1, n)."""

    def for_tiles(self, grid: ScoreGrid) -> Term:
        if (diagonals := grid.library.diagonals) is None:
            return self
        distances = grid.arange(1 - grid.queries - grid.position, grid.keys - grid.position)
        numbers = self.at_distances(grid, distances)
        has_masked = self.can_mask and bool(grid.xp.any(is_masked(numbers)))
        return DiagonalTerm(diagonals.view(numbers, grid.keys), has_masked)


@dataclass(frozen=True, slots=True, eq=False)
class DiagonalTerm(Added):
    """A number for each diagonal of the scores."""

    array: Array
    """(..., Hq, L, S), a view of (..., Hq, 1, L + S - 1)."""
    has_masked: bool

    def added(self, tile: Tile) -> Array:
        return tile.slice(self.array)

    def unmasked(self, _tile: Tile, added: Array) -> Allowed:
        return ~is_masked(added) if self.has_masked else True
