"""A mask for several documents in one sequence: a token attends only to its own document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .._checks.keywords import explains_keywords
from .._checks.score_arrays import frozen_integers
from .._libraries import astype_if_needed, dtype_name
from .._libraries.protocols import AnyArray, Array
from .._tiles import Allowed, Tile
from .._tiles.grid import CallGrid
from .._tiles.on_device import BlockBounds, bounds_of_list
from .algebra import FormulaPattern, Mask, Pattern


@explains_keywords
def document(query_ids: Sequence[int] | AnyArray, key_ids: Sequence[int] | AnyArray | None = None) -> Mask:
    """Return a mask of documents: query i attends to key j if query_ids[i] == key_ids[j].

        ids 0 0 1 1 1
            1 1 0 0 0
            1 1 0 0 0
            0 0 1 1 1
            0 0 1 1 1
            0 0 1 1 1

    Args:
        query_ids: The number of the document that each query belongs to: a list of L integers, or an integer
            array (..., L).
        key_ids: The number of the document of each key, (..., S). None means the same as `query_ids`.

    Returns:
        The mask. If the ids are sorted, tiles between different documents are skipped. `varlen_attention`
            computes the same from cumulative lengths.

    Raises:
        TypeError: The ids are not integers, or belong to another library.
        ValueError: The ids have another length than L (or S), or do not fit the batch.

    Examples:
        >>> from sdpa_xp import masks
        >>> packed = masks.causal() & masks.document([7, 7, 9])
        >>> masks.to_array(packed, (3, 3)).astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [0, 0, 1]])

    References:
        Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027, section 3.2.
    """
    return Document(*frozen_integers("document", query_ids=query_ids, key_ids=key_ids))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Document(Mask):
    """Made by `document`."""

    name = "document"
    counts = "slots"
    query_ids: Sequence[int] | AnyArray
    key_ids: Sequence[int] | AnyArray | None = None

    def bind(self, grid: CallGrid) -> Pattern:
        xp, shared = grid.xp, self.key_ids is None
        name, ids = ("query_ids", self.query_ids) if shared else ("key_ids", self.key_ids)
        hint = "If S is not L, pass the ids of the keys as `key_ids`." if shared else ""
        queries = grid.check_ids("attn_mask.query_ids", self.query_ids, "L")
        keys = grid.check_ids(f"attn_mask.{name}", ids, "S", hint)
        if queries.dtype != keys.dtype:  # JAX may be set to compare no unlike dtypes
            wider = max(queries, keys, key=lambda ids: int(dtype_name(ids.dtype).removeprefix("int")))
            queries, keys = (astype_if_needed(xp, ids, wider.dtype) for ids in (queries, keys))
        # with an axis of heads: (..., 1, L, 1) and (..., 1, 1, S)
        queries, keys = (xp.expand_dims(ids, axis=-2) for ids in (queries, keys))
        queries, keys = grid.in_all_axes(queries, 1), grid.in_all_axes(xp.expand_dims(keys, axis=-2))
        if not grid.access.waits:
            return SameId(queries, keys)
        return SameId(queries, keys, (_bounds(grid, self.query_ids, queries), _bounds(grid, ids, keys)))


@dataclass(frozen=True, slots=True, eq=False)
class SameId(FormulaPattern):
    """A pair may attend iff the id of the query, (..., 1, L, 1), equals the id of the key, (..., 1, 1, S)."""

    queries: Array
    keys: Array
    bounds: tuple[BlockBounds | None, BlockBounds | None] = (None, None)
    """Those of `queries` and of `keys`, if a device was asked for them."""
    spans: dict[tuple[object, ...], tuple[int, int]] = field(init=False, default_factory=dict)
    """The smallest and the largest id of each range, so that an id is read once, not once for each tile."""

    def formula(self, tile: Tile) -> Allowed:
        return tile.slice(self.queries) == tile.slice(self.keys)

    def uniform(self, tile: Tile) -> bool | None:
        of_queries, of_keys = self.bounds
        if of_queries is not None and of_keys is not None:
            least_i, most_i = of_queries.within(tile.rows, range(1))
            least_j, most_j = of_keys.within(range(1), tile.columns)
        elif not tile.grid.may_read(self.queries, self.keys):
            return None
        else:
            least_i, most_i = self._span(tile, "rows", tile.rows, self.queries)
            least_j, most_j = self._span(tile, "columns", tile.columns, self.keys)
        # Ids that do not overlap cannot be equal. Sorted ids are mostly decided here.
        if most_i < least_j or most_j < least_i:
            return False
        return True if least_i == most_i == least_j == most_j else None

    def _span(self, tile: Tile, axis: str, ids_range: range, ids: Array) -> tuple[int, int]:
        place = axis, ids_range, tile.leading
        # Without a lock: two threads that miss it at once compute the same numbers, and either may stay.
        if place not in self.spans:
            xp, of_tile = tile.grid.xp, tile.slice(ids)
            self.spans[place] = int(xp.min(of_tile)), int(xp.max(of_tile))
        return self.spans[place]


def _bounds(grid: CallGrid, ids: Sequence[int] | AnyArray | None, array: Array) -> BlockBounds | None:
    """Return the bounds of ids for a device that has to be waited for; those of a list are known without it."""
    if not isinstance(ids, tuple):
        return grid.block_bounds(array)
    least, most = bounds_of_list(ids)
    is_column = array.shape[-1] == 1
    return BlockBounds(*([[n] for n in numbers] if is_column else [numbers] for numbers in (least, most)))
