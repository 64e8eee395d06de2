"""Masks for several sequences in one row: a token attends its own document alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdpa_xp import checks
from sdpa_xp._libraries.protocols import AnyArray, Array
from sdpa_xp.masks.algebra import Allowed, Mask, Pattern
from sdpa_xp.pairs import Pairs
from sdpa_xp.tiles import Tile


def document(query_ids: Sequence[int] | AnyArray, key_ids: Sequence[int] | AnyArray | None = None) -> Mask:
    """Query i attends key j iff query_ids[i] == key_ids[j].

        ids 0 0 1 1 1
            1 1 0 0 0
            1 1 0 0 0
            0 0 1 1 1
            0 0 1 1 1
            0 0 1 1 1

    Shapes:
        `L` queries, `S` keys, `...` batch.

    Args:
        query_ids: The document of each query: a list of L integers, or an integer array (..., L).
        key_ids: The document of each key, (..., S). None where they are those of the queries.

    Returns:
        The mask. It holds L + S integers. Where ids are sorted, as in a packed row, tiles of two documents
            that do not meet are not looked at; `varlen_attention` does the same from cumulated lengths.

    Raises:
        TypeError: When a call uses the mask: ids that are no integers, or not of the query's library.
        ValueError: Likewise: ids of another length than L (or S), or that do not fit the batch.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.causal() & masks.document([7, 7, 9]), (3, 3)).astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [0, 0, 1]])

    References:
        Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027, section 3.2.
    """
    return Document(checks.frozen(query_ids), checks.frozen(key_ids))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Document(Mask):
    """Made by `document`."""

    name = "document"
    query_ids: Sequence[int] | AnyArray
    key_ids: Sequence[int] | AnyArray | None = None

    def bind(self, pairs: Pairs) -> Pattern:
        xp, shared = pairs.xp, self.key_ids is None
        name, ids = ("query_ids", self.query_ids) if shared else ("key_ids", self.key_ids)
        hint = "`key_ids` tells those of the keys, where S is not L." if shared else ""
        queries = pairs.along("attn_mask.query_ids", self.query_ids, pairs.queries, "L")
        keys = pairs.along(f"attn_mask.{name}", ids, pairs.keys, "S", hint)
        # with an axis of heads: (..., 1, L, 1) and (..., 1, 1, S)
        queries, keys = (xp.expand_dims(each, axis=-2) for each in (queries, keys))
        return SameId(xp.expand_dims(queries, axis=-1), xp.expand_dims(keys, axis=-2))


@dataclass(frozen=True, slots=True, eq=False)
class SameId(Pattern):
    """Where the ids of queries, (..., 1, L, 1), equal those of keys, (..., 1, 1, S)."""

    queries: Array
    keys: Array
    seen: dict[tuple[object, ...], tuple[int, int]] = field(default_factory=dict)
    """The smallest and the largest id of a range: each is looked at once."""

    def on(self, tile: Tile) -> Allowed:
        i, j = tile.cut(self.queries), tile.cut(self.keys)
        if not tile.pairs.traced:
            least, most = self._span(tile, "rows", tile.rows, i)
            first, last = self._span(tile, "columns", tile.columns, j)
            if most < first or last < least:
                return False
            if least == most == first == last:
                return True
        return i == j

    def _span(self, tile: Tile, axis: str, at: range, ids: Array) -> tuple[int, int]:
        place = axis, at, tile.pairs.part
        if place not in self.seen:
            xp = tile.pairs.xp
            self.seen[place] = int(xp.min(ids)), int(xp.max(ids))
        return self.seen[place]
