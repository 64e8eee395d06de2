"""What is added to the scores. A bias answers for a tile, as a mask does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sdpa_xp.protocols import Array, Dtype
from sdpa_xp.tiles import Tile


class Bias(Protocol):
    """Answers what is added to the scores of a tile; None is nothing."""

    def on(self, tile: Tile, dtype: Dtype) -> Array | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class FromArray:
    """A floating array that broadcasts to (..., Hq, L, S); -inf masks its pair."""

    array: Array

    def on(self, tile: Tile, dtype: Dtype) -> Array:
        return tile.xp.astype(tile.cut(self.array), dtype, copy=False)


@dataclass(frozen=True, slots=True)
class SumOf:
    """The sum of `biases`; without biases, nothing."""

    biases: tuple[Bias, ...] = ()

    def on(self, tile: Tile, dtype: Dtype) -> Array | None:
        total: Array | None = None
        for bias in self.biases:
            part = bias.on(tile, dtype)
            if part is not None:
                total = part if total is None else total + part
        return total
