"""The range of keys that some queries may attend; a block of queries reads only these keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from sdpa_xp_export._arrays import namespace as xp
from sdpa_xp_export._call.operands import kind_of
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.lowering.tile import GraphTile


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


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The first key, and the last + 1; None where a mask sets no bound."""

    start: GraphValue | None = None
    stop: GraphValue | None = None


def key_range(tile: GraphTile, first: GraphValue, last: GraphValue) -> tuple[GraphValue, GraphValue] | None:
    """Queries first to last, (1,) each -> the first key and the last + 1, (1,) each; None for all of the tile.

    The range holds at least one key. A mask without an entry in `_RANGES`, such as an array, sets no bound.
    """
    host, filled = tile.host, tile.lengths.filled
    queries = _Queries(tile, first, last)
    kinds = ((kind_of(mask), mask) for mask in tile.masks)
    ranges = [_RANGES[kind](tile, queries, **mask.arguments) for kind, mask in kinds if kind in _RANGES]
    if filled is not None and all(bounds.stop is None for bounds in ranges):
        ranges.append(KeyRange(stop=host.extreme("ReduceMax", filled)))
    starts = [bounds.start for bounds in ranges if bounds.start is not None]
    stops = [bounds.stop for bounds in ranges if bounds.stop is not None]
    if not starts and not stops:
        return None
    zero, keys = tile.graph.constant([0], "int64"), tile.column_range.stop
    if keys is None:
        keys = host.key_count
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


def _causal(tile: GraphTile, queries: _Queries, offset: object) -> KeyRange:
    return KeyRange(stop=_moved(tile, queries.last, offset, "ReduceMax") + 1)


def _sliding_window(
    tile: GraphTile, queries: _Queries, left: int | None, right: int | None, offset: object
) -> KeyRange:
    return KeyRange(
        None if left is None else _moved(tile, queries.first, offset, "ReduceMin") - left,
        None if right is None else _moved(tile, queries.last, offset, "ReduceMax") + (right + 1),
    )


def _padding(tile: GraphTile, _: _Queries, key_lengths: object, **_lengths: object) -> KeyRange:
    if key_lengths is None:
        return KeyRange()
    longest = tile.whole.limited("attn_mask.key_lengths", key_lengths)
    return KeyRange(stop=_extreme(tile, "ReduceMax", longest))


def _prefix(tile: GraphTile, _: _Queries, length: object) -> KeyRange:
    return KeyRange(stop=_extreme(tile, "ReduceMax", tile.whole.limited("attn_mask.length", length)))


def _chunked(_: GraphTile, queries: _Queries, size: int) -> KeyRange:
    return KeyRange(queries.first // size * size, (queries.last // size + 1) * size)


_RANGES: dict[str, Callable[..., KeyRange]] = {
    "causal": _causal,
    "sliding_window": _sliding_window,
    "padding": _padding,
    "prefix": _prefix,
    "chunked": _chunked,
}
"""The masks whose range follows from their numbers, by name."""
