"""Which pairs may attend. A mask is a small value that answers for a tile, so no L x S array is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sdpa_xp.protocols import Array
from sdpa_xp.tiles import Tile

Allowed: TypeAlias = bool | Array
"""True: every pair of the tile may attend. False: none may. An array: those where it is True."""


class Mask(Protocol):
    """Answers which pairs of a tile may attend."""

    def on(self, tile: Tile) -> Allowed: ...


@dataclass(frozen=True, slots=True)
class Causal:
    """Query i attends key j iff j <= i + offset; offset 0 is the upper-left alignment.

    offset 0, L=3 S=5     offset 2
        1 0 0 0 0         1 1 1 0 0
        1 1 0 0 0         1 1 1 1 0
        1 1 1 0 0         1 1 1 1 1
    """

    offset: int = 0

    def on(self, tile: Tile) -> Allowed:
        if tile.columns.stop - 1 <= tile.rows.start + self.offset:
            return True
        if tile.columns.start > tile.rows.stop - 1 + self.offset:
            return False
        return tile.row_index() + self.offset >= tile.column_index()


@dataclass(frozen=True, slots=True, eq=False)
class FromArray:
    """A boolean array that broadcasts to (..., Hq, L, S); True = may attend."""

    array: Array

    def on(self, tile: Tile) -> Allowed:
        return tile.cut(self.array)


@dataclass(frozen=True, slots=True)
class AllOf:
    """A pair may attend iff each of `masks` lets it; without masks every pair may."""

    masks: tuple[Mask, ...] = ()

    def on(self, tile: Tile) -> Allowed:
        allowed: Allowed = True
        for mask in self.masks:
            allowed = both(allowed, mask.on(tile))
        return allowed


def both(one: Allowed, other: Allowed) -> Allowed:
    """The pairs that both answers let attend."""
    if one is False or other is False:
        return False
    if one is True:
        return other
    if other is True:
        return one
    return one & other
