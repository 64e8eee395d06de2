"""Masks of tokens whose positions are not their places in the arrays, as in a cache that dropped tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar, cast

from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp._tiles.allowed import Allowed
from sdpa_xp._tiles.modifier import ScoreModifier
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import Tile, TokenPositions
from sdpa_xp.masks.algebra import Combined, Mask, Pattern

M = TypeVar("M", bound=ScoreModifier)


def reads_positions(modifier: ScoreModifier, *, consecutive: bool) -> bool:
    """Return whether the positions of the tokens change a mask or a bias.

    If queries and keys are `consecutive`, their distances are those of their places in the arrays.
    """
    if modifier.parts:
        return any(reads_positions(part, consecutive=consecutive) for part in modifier.parts)
    return modifier.counts == "positions" or (modifier.counts == "distances" and not consecutive)


def mask_at(mask: Mask, queries: AnyArray, keys: AnyArray, *, consecutive: bool) -> Mask:
    """Return a mask for queries and keys at these positions, int32 (..., L) and (..., S)."""
    if isinstance(mask, Combined):
        return replace(
            mask, masks=tuple(mask_at(m, queries, keys, consecutive=consecutive) for m in mask.masks)
        )
    return MaskAtPositions((mask,), queries, keys) if reads_positions(mask, consecutive=consecutive) else mask


def bound_positions(grid: ScoreGrid, queries: AnyArray, keys: AnyArray) -> TokenPositions:
    """Return positions (..., L) and (..., S) with axes for the scores, those of the grid's batch entries."""
    xp = grid.xp
    of_queries, of_keys = (grid.slice_entries(cast(Array, array), 1) for array in (queries, keys))
    of_queries, of_keys = (xp.expand_dims(array, axis=-2) for array in (of_queries, of_keys))
    return TokenPositions(grid.in_all_axes(of_queries, 1), grid.in_all_axes(xp.expand_dims(of_keys, axis=-2)))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MaskAtPositions(Mask):
    """A mask whose i and j are positions of the tokens. Caches make it of the caller's mask."""

    name = "at_positions"
    counts = "slots"
    masks: tuple[Mask]
    query_positions: AnyArray
    key_positions: AnyArray

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def bind(self, grid: ScoreGrid) -> Pattern:
        pattern = self.masks[0].bind(replace(grid, has_positions=True))
        return PatternAtPositions(pattern, bound_positions(grid, self.query_positions, self.key_positions))


@dataclass(frozen=True, slots=True, eq=False)
class PatternAtPositions(Pattern):
    """A pattern of positions. It bounds no range of keys, since the positions are not read."""

    pattern: Pattern
    positions: TokenPositions

    def allowed_in(self, tile: Tile) -> Allowed:
        return self.pattern.allowed_in(tile._replace(positions=self.positions))
