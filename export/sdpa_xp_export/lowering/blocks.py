"""What a block of queries computes: the keys that masks leave to it, and in each step a part of its heads.

The patterns of the library say the range. A block of many scores is cut into parts of its heads, as it does not
fit into the caches of a CPU's core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from sdpa_xp._checks.keywords import LARGEST_INTEGER
from sdpa_xp._checks.score_arrays import Integers
from sdpa_xp.masks.algebra import AllOf

from .. import _arrays as xp
from .._arrays import ops
from .._call.mask_analysis import heads_share_masks
from .._graph import Graph, GraphValue
from .formula import FormulaGrid, grid_fields, traced
from .tile import GraphLengths, GraphTile

SCORES_OF_A_STEP = 2**20
"""A block of more scores is cut into parts of its heads. For 8 heads of 2,048 and 4,096 tokens, causal, this
took 0.92 and 0.87 of the time of whole blocks (onnxruntime 1.31, 2 cores), and 0.8 of the memory."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _GridOfBounds(FormulaGrid):
    """The grid of a call whose integers have a least and a most, (1,), in the graph of a block of queries."""

    host: GraphLengths

    def check_integers(
        self, name: str, value: object, least: int = -LARGEST_INTEGER, most: int | str = LARGEST_INTEGER
    ) -> Integers:
        return self._bounded(super().check_integers(name, value, least, most), shifts=False)

    def check_offset(self, name: str, value: object) -> Integers:
        if isinstance(value, str) and not self.tile.call.cached:
            return Integers(*cast(Any, [self.host.more_keys] * 3))
        return self._bounded(super().check_integers(name, value), shifts=True)

    def _bounded(self, integers: Integers, *, shifts: bool) -> Integers:
        values: Any = integers.values
        if integers.most < math.inf:
            return integers
        ends = (self.host.extreme(op, values, shifts=shifts) for op in ("ReduceMin", "ReduceMax"))
        return Integers(values, *cast(Any, ends))


class _Block:
    """Where the first and the last query of a block stand among the keys, (1,) each; written when asked for."""

    def __init__(self, tile: GraphTile, first: GraphValue, last: GraphValue) -> None:
        self.tile = tile
        self.rows = first, last

    @cached_property
    def first_position(self) -> GraphValue:
        return self._placed(self.rows[0], "ReduceMin")

    @cached_property
    def last_position(self) -> GraphValue:
        return self._placed(self.rows[1], "ReduceMax")

    def slice_integers(self, integers: Integers) -> Integers:
        return integers

    def _placed(self, row: GraphValue, op: str) -> GraphValue:
        tile = self.tile
        if tile.lengths.filled is not None:
            # Batch entries may stand at different keys: the range covers all of them.
            return row + tile.host.extreme(op, cast(GraphValue, tile.whole.lengths.position))
        return row + tile.host.more_keys if tile.call.cached else row


def key_range(tile: GraphTile, first: GraphValue, last: GraphValue) -> tuple[GraphValue, GraphValue] | None:
    """Queries first to last, (1,) each -> the first key and the last + 1, (1,) each; None for all of the tile.

    The range holds at least one key.
    """
    host, filled, block = tile.host, tile.lengths.filled, cast(Any, _Block(tile, first, last))
    ranges: list[tuple[Any, Any]] = [(-math.inf, math.inf)]
    for mask in tile.masks:
        with traced("attn_mask", mask, _GridOfBounds(**grid_fields(tile.whole), host=host)) as pattern:
            patterns = pattern.patterns if isinstance(pattern, AllOf) else [pattern]
            ranges += [part.key_bounds(block) for part in patterns]
    starts, stops = ([end for end in ends if not isinstance(end, float)] for ends in zip(*ranges, strict=True))
    if filled is not None and not stops:
        stops.append(host.extreme("ReduceMax", filled))
    if not starts and not stops:
        return None
    zero, bounds = tile.graph.constant([0], "int64"), tile.column_range.bounds
    keys = host.key_count if bounds is None else bounds[1]
    start, stop = zero, keys
    for bound in starts:
        start = xp.maximum(start, bound, exact=False)
    for bound in stops:
        stop = xp.minimum(stop, bound, exact=False)
    # At least one key stays, so that no operator meets an empty axis; a query may still have no key among them.
    start = xp.maximum(xp.minimum(start, keys - 1, exact=False), zero, exact=False)
    return start, xp.maximum(stop, start + 1, exact=False)


class HeadParts:
    """The parts that the heads of a block are cut into: their number, and the heads of each, (1,)."""

    def __init__(self, lengths: GraphLengths, number: GraphValue | int) -> None:
        graph, sizes = lengths.graph, lengths.call.sizes
        ratio = sizes.query_heads // sizes.heads
        self.heads = sizes.heads
        self.folds: tuple[GraphValue, GraphValue] | None = None
        """The shapes for `matmul_grouped`, if only a run says how many heads a part has."""
        if isinstance(number, int):
            heads = sizes.heads // number
            self.dims: tuple[int | str, int | str] = heads, heads * ratio
            """The heads of a part as axes of arrays: of the keys, and of the queries."""
            self.number, self.keys = (graph.constant([count], "int64") for count in (number, heads))
            self.queries = self.keys if ratio == 1 else graph.constant([heads * ratio], "int64")
            return
        self.dims = "part heads", "part query heads" if ratio > 1 else "part heads"
        self.number = number
        self.keys = self.queries = xp.floor_divide(graph.constant([sizes.heads], "int64"), number, exact=False)
        if ratio > 1:
            self.queries = self.keys * ratio
            batch = [graph.constant([0] * len(sizes.batch), "int64")] if sizes.batch else []
            rest = graph.constant([-1, 0], "int64")
            self.folds = xp.concat([*batch, self.keys, rest]), xp.concat([*batch, self.queries, rest])


def head_parts(lengths: GraphLengths, block: int) -> HeadParts | None:
    """Return the parts of the heads of a block of so many queries; None if its heads stay together.

    Their number divides the key heads, so that all parts are alike and none shares a key head with another.
    """
    call, graph, heads = lengths.call, lengths.graph, lengths.call.sizes.heads
    # On a GPU, more and smaller steps would be more launches. Programs other than onnxruntime were not timed.
    if graph.runtime.provider not in ("cpu", "wasm") or not heads_share_masks(call) or heads == 1:
        return None
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    sizes = (*call.sizes.batch, call.sizes.query_heads, call.sizes.keys)
    queries = call.sizes.queries
    known = math.prod(size for size in sizes if isinstance(size, int))
    names = [size for size in sizes if isinstance(size, str)]
    if isinstance(queries, int) and not names:
        scores = known * min(queries, block)
        number = next((number for number in divisors if number * SCORES_OF_A_STEP >= scores), heads)
        return HeadParts(lengths, number) if number > 1 else None
    count = xp.clip(lengths.length(queries), 1, block, exact=False)
    for name in names:
        count = count * lengths.length(name)
    limits = graph.constant([number * SCORES_OF_A_STEP // max(known, 1) for number in divisors], "int64")
    fits = xp.where(limits >= count, graph.constant(divisors, "int64"), heads)
    return HeadParts(lengths, ops.reduce("ReduceMin", fits))


class HeadPart:
    """The heads of a step, if the steps take the parts of a block in turn."""

    def __init__(self, body: Graph, parts: HeadParts, step: GraphValue) -> None:
        """The number of a step, (1,) -> the number of its block, and the ranges of its heads."""
        self.body, self.dims = body, parts.dims
        number = body.here(parts.number)
        self.block = xp.floor_divide(step, number, exact=False)
        index = body.add("Mod", step, number, dtype="int64", shape=(1,))

        def bounds(count: GraphValue) -> tuple[GraphValue, GraphValue]:
            first = index * body.here(count)
            return first, first + body.here(count)

        self.key_heads = bounds(parts.keys)
        self.query_heads = self.key_heads if parts.queries is parts.keys else bounds(parts.queries)
        self.left = body.constant([parts.heads], "int64") - self.key_heads[1]
        """How many key heads of the block follow, (1,)."""
        self.folds = parts.folds and (body.here(parts.folds[0]), body.here(parts.folds[1]))

    def cut_keys(
        self, key: GraphValue, value: GraphValue, columns: tuple[GraphValue, GraphValue] | None
    ) -> tuple[GraphValue, GraphValue]:
        """key, value -> the heads of the part, and of these the keys in the bounds `columns`."""
        (first, stop), axes = self.key_heads, [-3]
        if columns is not None:  # with one Slice, because each copies
            first, stop, axes = xp.concat([first, columns[0]]), xp.concat([stop, columns[1]]), [-3, -2]
        bounds = first, stop, self.body.constant(axes, "int64")

        def cut(array: GraphValue) -> GraphValue:
            length = array.dims[-2] if columns is None else "block keys"
            shape = (*array.dims[:-3], self.dims[0], length, array.dims[-1])
            return self.body.add("Slice", array, *bounds, dtype=array.elem_type, shape=shape)

        return cut(key), cut(value)
