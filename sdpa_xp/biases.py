"""What is added to the scores. A bias answers for a tile, as a mask does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sdpa_xp.protocols import Array, Dtype
from sdpa_xp.tiles import Tile


class Bias(Protocol):
    """Answers what is added to the scores of a tile; -inf masks its pair."""

    def on(self, tile: Tile, dtype: Dtype) -> Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class FromArray:
    """A floating array that broadcasts to (..., Hq, L, S)."""

    array: Array

    def on(self, tile: Tile, dtype: Dtype) -> Array:
        return tile.xp.astype(tile.cut(self.array), dtype, copy=False)
