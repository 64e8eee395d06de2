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
