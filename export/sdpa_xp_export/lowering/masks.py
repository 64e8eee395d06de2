"""Each mask of the library as the condition that defines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.masks import Mask
from sdpa_xp_export._arrays import namespace as xp
from sdpa_xp_export._call.operands import kind_of
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.lowering.formula import allowed_by_formula
from sdpa_xp_export.lowering.index_functions import call_index_function
from sdpa_xp_export.lowering.tile import GraphTile

AllowedPairs: TypeAlias = GraphValue | bool
"""Boolean, broadcasts to (..., Hq, rows, columns). True if every pair may attend, False if none may."""


def allowed_pairs(mask: Mask, tile: GraphTile) -> AllowedPairs:
    """mask -> the pairs of the tile that may attend."""
    lowered = _LOWERED.get(kind_of(mask))
    return allowed_by_formula(mask, tile) if lowered is None else lowered(tile, **mask.arguments)


def all_allowed(tile: GraphTile, masks: Sequence[Mask]) -> AllowedPairs:
    """masks -> And of the pairs that they allow, and of the real keys of a padded cache; False as a value."""
    allowed: AllowedPairs = True
    for mask in masks:
        allowed = both_allow(allowed, allowed_pairs(mask, tile))
    if tile.lengths.filled is not None:
        allowed = both_allow(allowed, tile.key_index < tile.here(tile.lengths.filled))
    return tile.graph.constant(False, "bool") if allowed is False else allowed


def both_allow(one: AllowedPairs, other: AllowedPairs) -> AllowedPairs:
    """Return the pairs that both allow."""
    if one is True or other is False:
        return other
    return one if other is True or one is False else one & other


def _either_allows(one: AllowedPairs, other: AllowedPairs) -> AllowedPairs:
    if one is True or other is True:
        return True
    if one is False or other is False:
        return other if one is False else one
    return one | other


def _all_of(tile: GraphTile, masks: Sequence[Mask]) -> AllowedPairs:
    return reduce(both_allow, (allowed_pairs(mask, tile) for mask in masks))


def _any_of(tile: GraphTile, masks: Sequence[Mask]) -> AllowedPairs:
    return reduce(_either_allows, (allowed_pairs(mask, tile) for mask in masks))


def _none_of(tile: GraphTile, masks: Sequence[Mask]) -> AllowedPairs:
    (mask,) = masks
    allowed = allowed_pairs(mask, tile)
    return not allowed if isinstance(allowed, bool) else ~allowed


def _causal(tile: GraphTile, offset: object) -> AllowedPairs:
    return tile.key_index <= tile.query_index + tile.integers("attn_mask.offset", offset)


def _sliding_window(tile: GraphTile, left: int | None, right: int | None, offset: object) -> AllowedPairs:
    shift = tile.integers("attn_mask.offset", offset)  # an offset is checked even if it moves nothing
    if left is None and right is None:
        return True
    middle = tile.query_index + shift
    allowed: AllowedPairs = True
    if left is not None:
        allowed = tile.key_index >= middle - left
    if right is not None:
        allowed = both_allow(allowed, tile.key_index <= middle + right)
    return allowed


def _padding(tile: GraphTile, key_lengths: object, query_lengths: object) -> AllowedPairs:
    allowed: AllowedPairs = True
    if key_lengths is not None:
        allowed = tile.key_index < tile.limited("attn_mask.key_lengths", key_lengths, tile.call.sizes.keys)
    if query_lengths is not None:
        # Lengths count the queries of the call, so a cache does not move them.
        real = tile.limited("attn_mask.query_lengths", query_lengths, tile.call.sizes.queries)
        allowed = both_allow(allowed, tile.row < real)
    return allowed


def _prefix(tile: GraphTile, length: object) -> AllowedPairs:
    return tile.key_index < tile.limited("attn_mask.length", length)


def _document(tile: GraphTile, query_ids: object, key_ids: object) -> AllowedPairs:
    """ids (..., L) and (..., S) -> (..., 1, L, 1) == (..., 1, 1, S)."""
    if key_ids is None and tile.call.sizes.queries != tile.call.sizes.keys:
        rule = "`attn_mask.query_ids` must also have one integer for each key (S)"
        got = {"L": tile.call.sizes.queries, "S": tile.call.sizes.keys}
        raise ArgumentValueError(tile.graph.function, rule, got, "Pass the ids of the keys as `key_ids`.")
    queries = tile.ids("attn_mask.query_ids", query_ids, tile.call.sizes.queries)
    keys = queries if key_ids is None else tile.ids("attn_mask.key_ids", key_ids, tile.call.sizes.keys)
    queries, keys = (xp.expand_dims(ids, axis=-2) for ids in (queries, keys))
    return tile.cut(xp.expand_dims(queries, axis=-1)) == tile.cut(xp.expand_dims(keys, axis=-2))


def _chunked(tile: GraphTile, size: int) -> AllowedPairs:
    return tile.query_index // size == tile.key_index // size


def _dilated(tile: GraphTile, step: int) -> AllowedPairs:
    return tile.query_index % step == tile.key_index % step


def _from_array(tile: GraphTile, boolean: Any) -> AllowedPairs:
    return tile.cut(tile.operand(boolean))


def _from_function(tile: GraphTile, mask_mod: Callable[..., Any]) -> AllowedPairs:
    allowed: AllowedPairs = call_index_function("attn_mask", mask_mod, tile.indices, "bool")
    return allowed


def _at_positions(
    tile: GraphTile, masks: Sequence[Mask], query_positions: object, key_positions: object
) -> AllowedPairs:
    return allowed_pairs(masks[0], tile.at_positions(query_positions, key_positions))


_LOWERED: dict[str, Callable[..., AllowedPairs]] = {
    "&": _all_of,
    "|": _any_of,
    "~": _none_of,
    "causal": _causal,
    "sliding_window": _sliding_window,
    "padding": _padding,
    "prefix": _prefix,
    "document": _document,
    "chunked": _chunked,
    "dilated": _dilated,
    "from_array": _from_array,
    "from_function": _from_function,
    "at_positions": _at_positions,
}
"""The lowering of each mask by its name. Any other mask is traced from its own formula."""
