"""A tile is a range of queries against a range of keys; a plan is the tiles of one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdpa_xp.pairs import Pairs
from sdpa_xp.protocols import Array, Shape

# 256 x 1024 float32 scores a head are 1 MiB: they stay in cache between the two matrix products.
ROWS = 256
COLUMNS = 1024
# All heads of all batch entries are computed at once, so with many of them the tile shrinks.
SCORES = 4 * 2**20
SMALLEST = 64


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Queries `rows` against keys `columns`, of all batch entries and heads of `pairs`."""

    rows: range
    columns: range
    pairs: Pairs

    def cut(self, array: Array) -> Array:
        """The tile's part of an array that broadcasts to (..., Hq, L, S); an axis of 1 stays as it is."""
        if array.ndim >= 2 and array.shape[-2] != 1:
            array = array[..., self.rows.start : self.rows.stop, :]
        if array.ndim >= 1 and array.shape[-1] != 1:
            array = array[..., self.columns.start : self.columns.stop]
        return array

    @property
    def shape(self) -> Shape:
        """Of the tile's scores, (..., Hq, rows, columns)."""
        return (*self.pairs.scores[:-2], len(self.rows), len(self.columns))

    @property
    def first(self) -> int:
        """Where the first query stands among the keys."""
        return self.rows.start + self.pairs.position

    @property
    def last(self) -> int:
        """Where the last query stands among the keys."""
        return self.rows.stop - 1 + self.pairs.position

    @property
    def query_index(self) -> Array:
        """Where each query stands among the keys, (rows, 1)."""
        return self.pairs.query_index(self.rows)

    @property
    def key_index(self) -> Array:
        """Number of each key, (1, columns)."""
        return self.pairs.key_index(self.columns)

    @property
    def indices(self) -> tuple[Array, Array, Array, Array]:
        """b, h, i and j as int32 arrays that broadcast to (..., Hq, rows, columns)."""
        return self.pairs.entries(), self.pairs.head_index(), self.query_index, self.key_index


@dataclass(frozen=True, slots=True)
class Plan:
    """How one call is cut: tiles of at most `rows` x `columns` over L queries and S keys."""

    queries: int
    keys: int
    rows: int
    columns: int
    empty: bool = False
    """Whether the result has no element, so that no key needs to be looked at."""
    align: int = 1
    """Tiles begin at a multiple of this many keys: those of a paged cache at a block."""

    def row_ranges(self) -> Iterator[range]:
        """The queries, a range at a time; one empty range where there is no query."""
        return _cut(0, self.queries, self.rows) if self.queries else iter((range(0),))

    def column_ranges(self, reach: range) -> Iterator[range]:
        """The keys within `reach`, a range at a time; none where there is no query to attend one."""
        if self.empty or not reach:
            return
        start = reach.start - reach.start % self.align
        yield from _cut(start, min(reach.stop, self.keys), self.columns)


def plan(queries: int, keys: int, heads: int, *, traced: bool) -> Plan:
    """Choose the tiles of a call with `heads` query heads in all its batch entries together.

    A traced or lazy array gets one tile: its own compiler cuts the work, and a graph must not grow with
    the number of tiles.
    """
    empty = heads == 0 or queries == 0
    if traced:
        return Plan(queries, keys, queries, keys, empty)
    rows, columns = ROWS, COLUMNS
    while heads * rows * columns > SCORES and columns > SMALLEST:
        columns //= 2
        rows = max(rows // 2, SMALLEST)
    return Plan(queries, keys, rows, columns, empty)


def plan_blocks(queries: int, keys: int, size: int) -> Plan:
    """A tile a block of `size` keys, since blocks are not one array; traced calls as well."""
    return Plan(queries, keys, ROWS, size, queries == 0, align=size)


def plan_rows(queries: int, keys: int, heads: int, *, traced: bool) -> Plan:
    """Tiles as wide as all the keys, for a result that has a column for each of them."""
    rows = queries if traced else max(1, SCORES // max(1, heads * keys))
    return Plan(queries, keys, rows, keys, heads == 0 or queries == 0)


def _cut(start: int, stop: int, step: int) -> Iterator[range]:
    for first in range(start, stop, step):
        yield range(first, min(first + step, stop))
