"""Each mask of the library as the condition that defines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from sdpa_xp import checks
from sdpa_xp.masks import Mask
from sdpa_xp_export._array_api import ops
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export._graph.shapes import broadcasts_to
from sdpa_xp_export.lowering.tile import FUNCTION, GraphTile

AllowedPairs: TypeAlias = GraphValue | bool
"""Boolean, broadcasts to (..., Hq, rows, columns); True where every pair may attend."""


def allowed_pairs(mask: Mask, tile: GraphTile) -> AllowedPairs:
    """mask -> the pairs of the tile that may attend."""
    return _LOWERED[mask.name](tile, **mask.arguments)


def _all_of(tile: GraphTile, masks: Sequence[Mask]) -> AllowedPairs:
    return reduce(both_allow, (allowed_pairs(mask, tile) for mask in masks))


def _any_of(tile: GraphTile, masks: Sequence[Mask]) -> AllowedPairs:
    return reduce(_either_allows, (allowed_pairs(mask, tile) for mask in masks))


def _either_allows(one: AllowedPairs, other: AllowedPairs) -> AllowedPairs:
    if one is True or other is True:
        return True
    if one is False or other is False:
        return other if one is False else one
    return one | other


def _none_of(tile: GraphTile, masks: Sequence[Mask]) -> AllowedPairs:
    (mask,) = masks
    found = allowed_pairs(mask, tile)
    return not found if isinstance(found, bool) else ~found


def _causal(tile: GraphTile, offset: object) -> AllowedPairs:
    return tile.key_index <= tile.query_index + tile.integers("attn_mask.offset", offset)


def _sliding_window(tile: GraphTile, left: int | None, right: int | None, offset: object) -> AllowedPairs:
    found: AllowedPairs = True
    if left is None and right is None:
        return found
    middle = tile.query_index + tile.integers("attn_mask.offset", offset)
    if left is not None:
        found = tile.key_index >= middle - left
    if right is not None:
        found = both_allow(found, tile.key_index <= middle + right)
    return found


def _padding(tile: GraphTile, key_lengths: object, query_lengths: object) -> AllowedPairs:
    found: AllowedPairs = True
    if key_lengths is not None:
        found = tile.key_index < tile.integers("attn_mask.key_lengths", key_lengths)
    if query_lengths is not None:
        found = both_allow(found, tile.row < tile.integers("attn_mask.query_lengths", query_lengths))
    return found


def _prefix(tile: GraphTile, length: object) -> AllowedPairs:
    return tile.key_index < tile.integers("attn_mask.length", length)


def _document(tile: GraphTile, query_ids: object, key_ids: object) -> AllowedPairs:
    """ids (..., L) and (..., S) -> (..., 1, L, 1) == (..., 1, 1, S)."""
    if key_ids is None and tile.call.sizes.queries != tile.call.sizes.keys:
        rule = "`attn_mask.query_ids` must have one integer for each of S, too"
        got = {"L": tile.call.sizes.queries, "S": tile.call.sizes.keys}
        raise ValueError(checks.message(FUNCTION, rule, got, "`key_ids` tells those of the keys."))
    queries = tile.vector("attn_mask.query_ids", query_ids)
    keys = queries if key_ids is None else tile.vector("attn_mask.key_ids", key_ids)
    named = {"query_ids": (queries, tile.call.sizes.queries), "key_ids": (keys, tile.call.sizes.keys)}
    for name, (ids, length) in named.items():
        target = (*tile.call.sizes.batch, length)
        if ids.shape[-1:] != (length,) or not broadcasts_to(ids.shape, target):
            rule = f"`attn_mask.{name}` must have one integer for each of its tokens"
            raise ValueError(checks.message(FUNCTION, rule, {f"{name}.shape": ids.shape, "expected": target}))
    queries, keys = (ops.unsqueeze(ids, -2) for ids in (queries, keys))
    return tile.cut(ops.unsqueeze(queries, -1)) == tile.cut(ops.unsqueeze(keys, -2))


def _chunked(tile: GraphTile, size: int) -> AllowedPairs:
    return tile.query_index // size == tile.key_index // size


def _dilated(tile: GraphTile, step: int) -> AllowedPairs:
    return tile.query_index % step == tile.key_index % step


def _from_array(tile: GraphTile, boolean: Any) -> AllowedPairs:
    return tile.cut(tile.operand(boolean))


def _from_function(tile: GraphTile, mask_mod: Callable[..., Any]) -> AllowedPairs:
    found: AllowedPairs = call_index_function("attn_mask", mask_mod, tile.indices, "bool")
    return found


def both_allow(one: AllowedPairs, other: AllowedPairs) -> AllowedPairs:
    """The pairs that both let attend."""
    if one is True or other is False:
        return other
    return one if other is True or one is False else one & other


def call_index_function(
    name: str, function: Callable[..., Any], arguments: tuple[GraphValue, ...], dtype: str
) -> Any:
    """What a caller's function makes of values of the graph: a value of `dtype`, or for conditions a bool."""
    try:
        result = function(*arguments)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, NotImplementedError) as error:
        rule = f"`{name}` must be made of a function that traces to ONNX"
        hint = "Operators do, and the functions of `index.__array_namespace__()`."
        raise TypeError(checks.message(FUNCTION, rule, {"its error": error}, hint)) from error
    if isinstance(result, bool | np.bool_) and dtype == "bool":
        return bool(result)
    if not isinstance(result, GraphValue) or (result.dtype == "bool") != (dtype == "bool"):
        kind = "a condition" if dtype == "bool" else "scores"
        rule = f"`{name}` must be made of a function that returns {kind}"
        got = result.dtype if isinstance(result, GraphValue) else type(result).__name__
        raise TypeError(checks.message(FUNCTION, rule, {"its result": got}))
    return result.astype(dtype)


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
}
