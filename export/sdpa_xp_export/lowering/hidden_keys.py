"""Remove keys that masks hide from every query, once, before a loop over queries begins."""

from __future__ import annotations

import math

from sdpa_xp_export._arrays import namespace as xp
from sdpa_xp_export._arrays import ops
from sdpa_xp_export._call.mask_analysis import may_mask
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.lowering.graph_lengths import GraphLengths
from sdpa_xp_export.lowering.key_range import key_range
from sdpa_xp_export.lowering.masks import all_allowed
from sdpa_xp_export.lowering.tile import GraphTile, KeyMask, TileRange


def hide_keys(
    lengths: GraphLengths, key: GraphValue, value: GraphValue
) -> tuple[GraphValue, GraphValue, TileRange, KeyMask | None]:
    """Return keys and values, the range of keys that is left of all, and what is masked there.

    Keys that no query attends are cut off if they are the last ones of all batch entries, and else 0. Nothing
    is done if no mask says so by itself, or if a bias may be infinite: -inf + inf would be NaN. With a cache,
    few queries meet many keys, and a copy of these takes longer than to mask the scores.
    """
    call, graph = lengths.call, lengths.graph
    queries, columns = TileRange("queries", call.sizes.queries), TileRange("keys", key.dims[-2])
    masks = tuple(mask for mask in call.masks if mask.hides_whole_keys)
    if not masks or call.cached or any(map(may_mask, call.biases)):
        return key, value, columns, None
    last_query = xp.expand_dims(lengths.queries, axis=0) - 1
    kept = key_range(
        GraphTile(lengths, graph, queries, columns, masks), graph.constant([0], "int64"), last_query
    )
    if kept is not None:
        key, value = (ops.cut(array, kept, -2, "kept_keys") for array in (key, value))
        columns = TileRange("keys", "kept_keys", *kept)
    allowed = all_allowed(GraphTile(lengths, graph, queries, columns, masks), masks)
    assert isinstance(allowed, GraphValue)
    allowed = ops.to_rank(allowed, 2)
    key, value = (xp.where(xp.matrix_transpose(allowed), array, 0.0) for array in (key, value))
    added = xp.where(allowed, graph.constant(0.0, key.elem_type), -math.inf)
    return key, value, columns, KeyMask(allowed, added)
