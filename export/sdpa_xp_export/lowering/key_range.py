"""The range of keys that some queries may attend; a block of queries reads only these keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdpa_xp_export._array_api import namespace as xp
from sdpa_xp_export._array_api import ops
from sdpa_xp_export._call.operands import kind_of
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.lowering import counting
from sdpa_xp_export.lowering.tile import GraphTile

BEYOND = 2**30
"""Further than any length; numbers are cut off here, since onnxruntime compares larger ones wrong."""


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The first key, and the last + 1; None where a mask sets no bound."""

    start: GraphValue | None = None
    stop: GraphValue | None = None


def key_range(tile: GraphTile, first: GraphValue, last: GraphValue) -> tuple[GraphValue, GraphValue] | None:
    """Queries first to last, (1,) each -> the first key and the last + 1, (1,) each; None for all of the tile.

    The range holds at least one key. A mask without an entry in `_RANGES`, such as an array, sets no bound.
    """
    position = tile.lengths.position
    if isinstance(position, GraphValue):
        # Batch entries may stand at different keys: the range covers all of them.
        low, high = least(tile, tile.here(position)), most(tile, tile.here(position))
        first, last = first + low, last + high
    kinds = ((kind_of(mask), mask) for mask in tile.masks)
    ranges = [_RANGES[kind](tile, first, last, **mask.arguments) for kind, mask in kinds if kind in _RANGES]
    if tile.lengths.filled is not None:
        ranges.append(KeyRange(stop=most(tile, tile.here(tile.lengths.filled))))
    starts = [bounds.start for bounds in ranges if bounds.start is not None]
    stops = [bounds.stop for bounds in ranges if bounds.stop is not None]
    if not starts and not stops:
        return None
    zero, keys = tile.graph.constant([0], "int64"), tile.column_range.stop
    if keys is None:
        keys = ops.unsqueeze(tile.here(tile.lengths.kept_keys), 0)
    start, stop = zero, keys
    for bound in starts:
        start = counting.larger(start, bound)
    for bound in stops:
        stop = counting.smaller(stop, bound)
    # At least one key stays, so that no operator meets an empty axis; a query may still have no key among them.
    start = counting.larger(counting.smaller(start, keys - 1), zero)
    return start, counting.larger(stop, start + 1)


def least(tile: GraphTile, value: GraphValue | int) -> GraphValue:
    """integers -> the smallest of them, (1,)."""
    return _extreme(tile, "ReduceMin", value)


def most(tile: GraphTile, value: GraphValue | int) -> GraphValue:
    """integers -> the largest of them, (1,)."""
    return _extreme(tile, "ReduceMax", value)


def _extreme(tile: GraphTile, op: str, value: GraphValue | int) -> GraphValue:
    if isinstance(value, int):
        return tile.graph.constant([value], "int64")
    flat = ops.reshape(xp.clip(value, -BEYOND, BEYOND), [-1], ("all",))
    return ops.reduce(op, flat)


def _causal(tile: GraphTile, _first: GraphValue, last: GraphValue, offset: object) -> KeyRange:
    return KeyRange(stop=last + most(tile, tile.integers("attn_mask.offset", offset)) + 1)


def _sliding_window(
    tile: GraphTile,
    first: GraphValue,
    last: GraphValue,
    left: int | None,
    right: int | None,
    offset: object,
) -> KeyRange:
    shift = tile.integers("attn_mask.offset", offset)
    return KeyRange(
        None if left is None else first + least(tile, shift) - left,
        None if right is None else last + most(tile, shift) + (right + 1),
    )


def _padding(tile: GraphTile, _first: GraphValue, _last: GraphValue, key_lengths: object, **_: Any) -> KeyRange:
    if key_lengths is None:
        return KeyRange()
    return KeyRange(stop=most(tile, tile.limited("attn_mask.key_lengths", key_lengths)))


def _prefix(tile: GraphTile, _first: GraphValue, _last: GraphValue, length: object) -> KeyRange:
    return KeyRange(stop=most(tile, tile.limited("attn_mask.length", length)))


def _chunked(_tile: GraphTile, first: GraphValue, last: GraphValue, size: int) -> KeyRange:
    return KeyRange(first // size * size, (last // size + 1) * size)


_RANGES: dict[str, Callable[..., KeyRange]] = {
    "causal": _causal,
    "sliding_window": _sliding_window,
    "padding": _padding,
    "prefix": _prefix,
    "chunked": _chunked,
}
"""The masks whose range follows from their numbers, by name."""
