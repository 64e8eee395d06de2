"""A tile is a range of queries against a range of keys; a plan is the tiles of one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdpa_xp.protocols import Array, Device, Namespace

# 256 x 1024 float32 scores a head are 1 MiB: they stay in cache between the two matrix products.
ROWS = 256
COLUMNS = 1024
# All heads of all batch entries are computed at once, so with many of them the tile shrinks.
SCORES = 4 * 2**20
SMALLEST = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `rows` against keys `columns`, and where to make arrays of their indices."""

    rows: range
    columns: range
    xp: Namespace
    device: Device

    def cut(self, array: Array) -> Array:
        """The tile's part of an array that broadcasts to (..., Hq, L, S); an axis of 1 stays as it is."""
        if array.ndim >= 2 and array.shape[-2] != 1:
            array = array[..., self.rows.start : self.rows.stop, :]
        if array.ndim >= 1 and array.shape[-1] != 1:
            array = array[..., self.columns.start : self.columns.stop]
        return array

    def row_index(self) -> Array:
        """Query indices, (rows, 1)."""
        rows = self.xp.arange(self.rows.start, self.rows.stop, dtype=self.xp.int32, device=self.device)
        return self.xp.expand_dims(rows, axis=-1)

    def column_index(self) -> Array:
        """Key indices, (1, columns)."""
        columns = self.xp.arange(self.columns.start, self.columns.stop, dtype=self.xp.int32, device=self.device)
        return self.xp.expand_dims(columns, axis=0)


@dataclass(frozen=True, slots=True)
class Plan:
    """How one call is cut: tiles of at most `rows` x `columns` over L queries and S keys."""

    queries: int
    keys: int
    rows: int
    columns: int
    empty: bool = False
    """Whether the result has no element, so that no key needs to be looked at."""

    def row_ranges(self) -> Iterator[range]:
        """The queries, a range at a time; one empty range where there is no query."""
        return _cut(self.queries, self.rows)

    def column_ranges(self) -> Iterator[range]:
        """The keys, a range at a time; none where there is no key, or no query to attend one."""
        return iter(()) if self.empty or self.keys == 0 else _cut(self.keys, self.columns)


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


def plan_rows(queries: int, keys: int, heads: int, *, traced: bool) -> Plan:
    """Tiles as wide as all the keys, for a result that has a column for each of them."""
    rows = queries if traced else max(1, SCORES // max(1, heads * keys))
    return Plan(queries, keys, rows, keys, heads == 0 or queries == 0)


def _cut(length: int, step: int) -> Iterator[range]:
    if length == 0:
        yield range(0)
    for start in range(0, length, step or 1):
        yield range(start, min(start + step, length))
