"""Dropout: which weights are dropped follows from the place of their pair and a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .._libraries.protocols import Array
from .._tiles import Tile


@dataclass(frozen=True, slots=True, eq=False)
class Dropout:
    """Each weight is dropped with probability p, and the others are divided by 1 - p.

    Which pair is dropped follows from its place, not from how the call is cut: the generator is counter-based,
    as in flash-attention. A seed is drawn from the caller's generator once, and each pair (b, h, i, j) is
    hashed with it. So the output and the weights drop the same pairs, and so do two libraries with one seed.

    Srivastava et al., "Dropout", JMLR 15, 2014, section 10, for the division by 1 - p;
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, for counters as random numbers.
    """

    array_axes: ClassVar = {"seed": (None,)}
    p: float
    seed: Array
    """Four random int32."""

    def apply(self, tile: Tile, weights: Array) -> Array:
        """Return weights (..., Hq, rows, columns), with 0 for those that are dropped."""
        xp = tile.grid.xp
        if self.p == 1:
            return xp.zeros_like(weights)
        kept = self._uniform(tile) >= round(self.p * 2**31)
        return xp.where(kept, weights * (1 / (1 - self.p)), 0.0)

    def _uniform(self, tile: Tile) -> Array:
        """Return a random integer from 0 to 2^31 - 1 for each pair.

        Row and column are each hashed to 64 bits. Both halves are mixed, so that rows with one equal half still
        differ.
        """
        b, h, i, j = tile.indices
        words = tile.grid.in_all_axes(self.seed)
        # Slices keep the axes, along which each number broadcasts to all pairs.
        seed = [words[..., index : index + 1] for index in range(4)]
        head = b * tile.grid.heads + h
        rows = [_mix(_mix(_mix(head ^ seed[half]) + i) ^ seed[half + 2]) for half in (0, 1)]
        columns = [_mix(_mix(j + seed[half]) ^ seed[half + 2]) for half in (0, 1)]
        return _mix(_mix(rows[0] ^ columns[0]) + (rows[1] ^ columns[1])) & 0x7FFFFFFF


def _mix(x: Array) -> Array:
    """Map int32 to int32 one to one, so that near numbers become unlike.

    Wellons, "Prospecting for hash functions", 2018: `lowbias32`, whose bias is 0.17.
    """
    # A shift of int32 repeats the sign, which `&` takes away: not every library shifts unsigned integers.
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as int32
    return x ^ ((x >> 16) & 0xFFFF)
