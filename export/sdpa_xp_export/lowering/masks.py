"""The range of keys that masks leave to a block of queries."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeAlias, cast

from sdpa_xp.masks import Mask

from .. import _arrays as xp
from .._call.operands import kind_of
from .._graph.graph import GraphValue
from .tile import GraphTile


class _Queries:
    """Where the first and the last query of a tile stand among the keys, (1,) each; written when asked for."""

    def __init__(self, tile: GraphTile, first: GraphValue, last: GraphValue) -> None:
        self.tile = tile
        self.rows = first, last

    @cached_property
    def first(self) -> GraphValue:
        return self._placed(self.rows[0], "ReduceMin")

    @cached_property
    def last(self) -> GraphValue:
        return self._placed(self.rows[1], "ReduceMax")

    def _placed(self, row: GraphValue, op: str) -> GraphValue:
        tile = self.tile
        if tile.lengths.filled is not None:
            # Batch entries may stand at different keys: the range covers all of them.
            return row + tile.host.extreme(op, cast(GraphValue, tile.whole.lengths.position))
        return row + tile.host.more_keys if tile.call.cached else row


KeyRange: TypeAlias = tuple[GraphValue | None, GraphValue | None]
"""The first key, and the last + 1, (1,) each; None where a mask sets no bound."""


def key_range(tile: GraphTile, first: GraphValue, last: GraphValue) -> tuple[GraphValue, GraphValue] | None:
    """Queries first to last, (1,) each -> the first key and the last + 1, (1,) each; None for all of the tile.

    The range holds at least one key.
    """
    host, filled = tile.host, tile.lengths.filled
    queries = _Queries(tile, first, last)
    ranges = [_bounds(mask, tile, queries) for mask in tile.masks]
    if filled is not None and all(stop is None for _, stop in ranges):
        ranges.append((None, host.extreme("ReduceMax", filled)))
    starts = [start for start, _ in ranges if start is not None]
    stops = [stop for _, stop in ranges if stop is not None]
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


def _extreme(tile: GraphTile, op: str, integers: GraphValue | int) -> GraphValue:
    """A number, or integers of the graph around the tile's -> the smallest or the largest of them, (1,)."""
    if isinstance(integers, int):
        return tile.graph.constant([integers], "int64")
    return tile.host.extreme(op, integers)


def _moved(tile: GraphTile, query: GraphValue, offset: object, op: str) -> GraphValue:
    """query, (1,) -> where the smallest or the largest offset of all batch entries moves it."""
    if isinstance(offset, str):  # "lower_right"; a cache moves the queries by itself
        return query if tile.call.cached else query + tile.host.more_keys
    integers = tile.whole.integers("attn_mask.offset", offset)
    if isinstance(integers, int):
        return query + _extreme(tile, op, integers) if integers else query
    return query + tile.host.extreme(op, integers, shifts=True)


def _bounds(mask: Mask, tile: GraphTile, queries: _Queries) -> KeyRange:
    """Return the range that follows from the numbers of a mask; an array, for example, sets no bound."""
    arguments: Any = mask.arguments
    match kind_of(mask):
        case "causal" | "sliding_window":
            left, right, offset = arguments.get("left"), arguments.get("right", 0), arguments["offset"]
            start = None if left is None else _moved(tile, queries.first, offset, "ReduceMin") - left
            stop = None if right is None else _moved(tile, queries.last, offset, "ReduceMax") + (right + 1)
            return start, stop
        case "padding" | "prefix":
            name = "key_lengths" if "key_lengths" in arguments else "length"
            if arguments[name] is not None:
                lengths = tile.whole.integers(f"attn_mask.{name}", arguments[name])
                return None, _extreme(tile, "ReduceMax", lengths)
        case "chunked":
            size = arguments["size"]
            return queries.first // size * size, (queries.last // size + 1) * size
    return None, None
