"""A tile is a range of queries against a range of keys; a plan is the tiles of one call."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp.checks import Integers
from sdpa_xp.pairs import Pairs


class Cut(NamedTuple):
    """How large tiles are. Measured: tests/benchmarks/attention.py."""

    rows: int
    columns: int
    scores: int
    """Of one tile, all of its heads together."""


CORES = Cut(512, 256, 2**17)
"""For cores that have a cache each: 512 KiB of float32 scores stay in it from the first product to the second,
and BLAS is at its best with the longer side on the left."""
SHARED = Cut(512, 512, 2**18)
"""For cores that compute the heads of a tile together; its scores are those of one core."""
DEVICE = Cut(256, 1024, 2**22)
"""For a device that computes all heads of all entries at once; with many of them the tile shrinks."""
SMALLEST = 64

WORTH_THREADS = 2**23
"""Multiplications that take longer than it takes to start a thread."""
WORTH_BOUND = 64
"""Queries and keys of a tile from which on the norms, which tell that no maximum is needed, cost little."""

Part: TypeAlias = tuple[range, ...]
"""Ranges of the leading axes (..., Hq) of the scores."""


class Tile(NamedTuple):
    """Queries `rows` against keys `columns`, of the batch entries and heads that `pairs` says."""

    rows: range
    columns: range
    pairs: Pairs

    def cut(self, array: Array) -> Array:
        """The tile's part of an array that broadcasts to (..., Hq, L, S); an axis of 1 stays as it is."""
        ranges = (*(self.pairs.part or ()), self.rows, self.columns)[-array.ndim :] if array.ndim else ()
        array = cut(array, ranges)
        return array if self.pairs.block is None else self.pairs.block.of(array)

    def of_queries(self, array: Array) -> Array:
        """The tile's rows of an array (..., L, width)."""
        if self.pairs.block is not None:
            return self.pairs.block.of(array)
        return array[..., self.rows.start : self.rows.stop, :]

    def own(self, integers: Integers) -> Integers:
        """Integers for the batch entries of the tile, where it has not all of them."""
        if self.pairs.part is None or isinstance(integers.values, int):
            return integers
        values = self.cut(integers.values)
        if math.prod(values.shape) != 1:
            return integers._replace(values=values)
        only = int(self.pairs.xp.min(values))
        return Integers(only, only, only)

    def of_heads(self, array: Array) -> Array:
        """The tile's part of an array (Hq, ...)."""
        heads = self.pairs.part[-1] if self.pairs.part else range(self.pairs.heads)
        return array[heads.start : heads.stop, ...]

    @property
    def shape(self) -> Shape:
        """Of the tile's scores, (..., Hq, rows, columns)."""
        block = self.pairs.block
        rows = len(self.rows) if block is None else block.length
        return (*self.pairs.scores[:-2], rows, len(self.columns))

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
        leading = self.cut(self.pairs.entries()), self.cut(self.pairs.head_index())
        return *leading, self.query_index, self.key_index


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
    parts: tuple[Part, ...] = ()
    """The leading axes in parts that are computed by themselves; without any, all at once."""
    threads: int | None = 1
    """None is as many as BLAS has."""
    bounded: bool = False
    """Whether to look for a bound of the scores, with which no maximum is needed."""
    rolled: bool = False
    """Whether blocks of `rows` queries are the passes of one loop that a compiler keeps."""

    @property
    def is_one_task(self) -> bool:
        """Whether all is computed at once."""
        return not self.parts and self.queries <= self.rows

    def tasks(self) -> list[Task]:
        """What is computed by itself, the rows with the most keys under a causal mask first."""
        rows = [*self.row_ranges()][::-1]
        return [Task(part, each) for each in rows for part in self.parts or (None,)]

    def row_ranges(self) -> Iterator[range]:
        """The queries, a range at a time; one empty range where there is no query."""
        return _cut(0, self.queries, self.rows) if self.queries else iter((range(0),))

    def column_ranges(self, reach: range) -> Iterator[range]:
        """The keys within `reach`, a range at a time; none where there is no query to attend one."""
        if self.empty or not reach:
            return
        start, stop = reach.start - reach.start % self.align, min(reach.stop, self.keys)
        for first in range(start, stop, self.columns):
            yield range(first, min(first + self.columns, stop))


class Task(NamedTuple):
    """A range of queries of one part, or of all."""

    part: Part | None
    rows: range


def plan(pairs: Pairs, group: int, widths: int) -> Plan:
    """Choose the tiles of a call with `group` query heads a key head, and `widths` = E + Ev.

    A traced or lazy array gets one tile, since a graph must not grow with the number of tiles; or one loop
    over the queries, where its compiler has loops.
    """
    queries, keys, heads = pairs.queries, pairs.keys, math.prod(pairs.leading)
    empty = heads == 0 or queries == 0
    if pairs.traced and not empty and pairs.library.has_loops() and _are_many(heads * queries * keys):
        most = max(SMALLEST, DEVICE.scores // (heads * keys))
        passes = -(-queries // most)
        return Plan(queries, keys, -(-queries // passes), keys, rolled=True)
    if pairs.traced or empty or keys == 0:
        return Plan(queries, keys, max(1, queries), max(1, keys), empty)
    if pairs.execution_kind == "device":
        rows, columns, _ = DEVICE
        while heads * rows * columns > DEVICE.scores and columns > SMALLEST:
            columns //= 2
            rows = max(rows // 2, SMALLEST)
        return Plan(queries, keys, rows, columns)
    cores, groups = os.cpu_count() or 1, heads // group
    one, together = (CORES, 1) if pairs.execution_kind == "blas_threaded" else (SHARED, cores)
    threaded = pairs.execution_kind == "blas_threaded" and heads * queries * keys * widths >= WORTH_THREADS
    share = -(-queries * groups // (2 * cores)) if threaded else queries  # rows enough for each core
    rows = min(queries, max(1, one.rows // group), max(SMALLEST, share))
    columns = max(one.scores // (rows * group), one.columns)
    units = one.scores * together // (rows * group * min(columns, keys))
    heads_of_core = groups // cores if threaded else units
    return Plan(
        queries,
        keys,
        rows,
        columns,
        parts=_parts(pairs.leading, group, max(1, min(units, heads_of_core))),
        threads=None if threaded else 1,
        bounded=min(rows * group, keys) >= WORTH_BOUND,
    )


def _are_many(scores: object) -> bool:
    """Whether so many scores are too many at once, as far as it is known: a length may be a symbol."""
    return isinstance(scores, int) and scores > DEVICE.scores


def _parts(leading: Shape, group: int, units: int) -> tuple[Part, ...]:
    """The leading axes cut into parts of about `units` key heads; none where one part would be all."""
    ranges: list[list[range]] = []
    step = group
    for length in reversed(leading):
        size = min(length // step, units) * step
        ranges.insert(0, [*_cut(0, length, size)])
        units, step = max(1, units * step // size), 1
    return () if all(len(each) == 1 for each in ranges) else tuple(itertools.product(*ranges))


def plan_blocks(queries: int, keys: int, size: int) -> Plan:
    """A tile a block of `size` keys, since blocks are not one array; traced calls as well."""
    return Plan(queries, keys, DEVICE.rows, size, queries == 0, align=size)


def plan_rows(queries: int, keys: int, heads: int, *, traced: bool) -> Plan:
    """Tiles as wide as all the keys, for a result that has a column for each of them."""
    rows = queries if traced else max(1, DEVICE.scores // max(1, heads * keys))
    return Plan(queries, keys, rows, keys, heads == 0 or queries == 0)


def _cut(start: int, stop: int, step: int) -> Iterator[range]:
    for first in range(start, stop, step):
        yield range(first, min(first + step, stop))


def cut(array: Array, ranges: tuple[range, ...]) -> Array:
    """The part of the last axes of `array` that `ranges` say; an axis of 1 stays as it is."""
    shape = array.shape[-len(ranges) :]
    index = [slice(r.start, r.stop) if n != 1 else slice(None) for r, n in zip(ranges, shape, strict=True)]
    return array[(..., *index)] if index else array


def cut_leading(array: Array, part: Part) -> Array:
    """The part of the axes before the last two; an axis of 1 stays as it is."""
    return cut(array, (*part[len(part) + 2 - array.ndim :], *map(range, array.shape[-2:])))
