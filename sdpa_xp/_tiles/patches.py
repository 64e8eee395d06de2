"""Blocks of queries with a list of keys each, for masks whose ranges of keys would hold many masked ones."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .._libraries.protocols import Array
from .score_grid import ScoreGrid


class KeyLists(NamedTuple):
    """The tokens of each block, int32."""

    queries: Array
    """(blocks, n). A query may stand in two blocks, which give it the same output."""
    keys: Array
    """(blocks, m): once each key that a query of the block attends to, and others."""
    places: Array
    """(L,): where each query of the call stands among `queries`."""


class Patches(Protocol):
    """How a mask cuts the queries of a call into blocks."""

    @property
    def blocks(self) -> int: ...
    @property
    def queries(self) -> int:
        """The queries of a block."""

    @property
    def keys(self) -> int:
        """The keys of a block."""

    def lists(self, grid: ScoreGrid, /) -> KeyLists: ...


class PatchSize(NamedTuple):
    """The smallest patch that a mask is asked for: large ones compute more pairs, small ones copy more keys."""

    queries: int
    copies: float
    """The most keys that are copied for each query."""


ONE_CORE_PATCH = PatchSize(2, 32)
"""For NumPy. An image of 64 x 64 with windows of 7 x 7 gets patches of 1 x 2, which compute 1.14 times the
allowed pairs. Patches of 2 x 2 took 0.8 times as long, but compute 1.31 times the pairs."""
ALL_CORES_PATCH = PatchSize(16, 8)
"""For libraries whose operations cost more: 1 x 2 took 2 (torch) and 3 times (JAX) as long as 4 x 4."""


def patch_size(grid: ScoreGrid) -> PatchSize:
    """Return the size for a library."""
    return ONE_CORE_PATCH if grid.uses_our_threads else ALL_CORES_PATCH
