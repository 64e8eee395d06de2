"""The range of keys that masks leave to a block of queries, as the patterns of the library say it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from sdpa_xp._checks.integers import Integers
from sdpa_xp._checks.keywords import LARGEST_INTEGER
from sdpa_xp.masks.patterns import AllOf

from .. import _arrays as xp
from .._graph import GraphValue
from .formula import FormulaGrid, grid_fields, traced
from .graph_lengths import GraphLengths
from .tile import GraphTile


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
