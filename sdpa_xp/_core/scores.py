"""The scores of a tile: scale -> softcap -> bias -> mask, in the accumulation dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from sdpa_xp._core.dropout import Dropout
from sdpa_xp._core.key_value_source import KeyValueSource
from sdpa_xp._core.products import key_leading_slice, matmul_grouped
from sdpa_xp._core.tile_buffers import CallBuffers
from sdpa_xp._libraries.dtypes import LARGEST, astype_if_needed, dtype_name
from sdpa_xp._libraries.protocols import Array, Namespace, Shape
from sdpa_xp._tiles.allowed import Allowed, both, is_masked
from sdpa_xp._tiles.plan import Plan
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import LeadingSlice, RowBlock, Tile, slice_leading
from sdpa_xp.biases.algebra import Term
from sdpa_xp.masks.algebra import AllOf, Pattern


class BoundOptions(NamedTuple):
    """The options of a call, checked against a grid and converted to its library: an option is a field here."""

    mask: Pattern
    biases: tuple[Term, ...]
    scale: float | Array
    softcap: float | None
    sinks: Array | None
    """A logit that joins the sum of each row and has no value, (..., Hq, 1, 1) in the accumulation dtype."""
    dropout: Dropout | None = None
    finite_inputs: frozenset[str] | None = None
    """The names of the inputs without NaN and inf; None if they have not been searched."""

    @property
    def is_unmasked(self) -> bool:
        """Whether every pair may attend, whatever the values."""
        return isinstance(self.mask, AllOf) and len(self.mask.patterns) == len(self.biases) == 0

    @property
    def may_mask(self) -> bool:
        """Whether a pair may be masked. If none is, each NaN and inf belongs to the result."""
        if not isinstance(self.mask, AllOf) or self.mask.patterns:
            return True
        return True in [bias.can_mask for bias in self.biases]

    @property
    def has_functions(self) -> bool:
        """Whether a function of the caller sees the scores. It may keep them, or use autograd."""
        return any(bias.is_of_caller for bias in self.biases)

    def for_tiles(self, grid: ScoreGrid) -> BoundOptions:
        """Return the options with what the tiles of a call share computed already."""
        return self._replace(biases=tuple([bias.for_tiles(grid) for bias in self.biases]))

    def slice_leading(self, leading: LeadingSlice) -> BoundOptions:
        """Return the options of some batch entries and heads; masks, biases and dropout slice for each tile."""
        return self if self.sinks is None else self._replace(sinks=slice_leading(self.sinks, leading))


MOST_ANSWERED = 2**12
"""The scores of the largest call whose mask is asked once for all equal calls: its answer is an array."""


class Scores(NamedTuple):
    """All that the scores are computed from. Nothing is computed until a tile is asked for."""

    grid: ScoreGrid
    query: Array
    """(..., Hq, L, E)."""
    key: KeyValueSource
    """(..., H, S, E)."""
    options: BoundOptions
    leading: LeadingSlice | None = None
    """The batch entries and heads that these scores are for; None is all of the grid."""
    block: RowBlock | None = None
    """The queries of an iteration of a compiler's loop; None outside of such loops."""
    answers: dict[str, Any] | None = None
    """What equal calls keep of the answers of their mask."""
    buffers: CallBuffers | None = None
    """The buffers in which the arrays of each tile are computed; with None, each tile allocates new arrays."""

    @property
    def xp(self) -> Namespace:
        return self.grid.xp

    @property
    def group(self) -> int:
        """The number of query heads for each key head."""
        return self.query.shape[-3] // (self.key.heads or 1)

    @property
    def leading_shape(self) -> Shape:
        """The lengths of the axes (..., Hq) that these scores are for."""
        return self.grid.leading_shape if self.leading is None else tuple(map(len, self.leading))

    def slice_leading(self, leading: LeadingSlice | None) -> Scores:
        """Return the scores of some batch entries and heads."""
        if leading is None:
            return self
        return self._replace(
            query=slice_leading(self.query, leading),
            key=self.key.slice_leading(key_leading_slice(leading, self.group)),
            options=self.options.slice_leading(leading),
            leading=leading,
        )

    def in_block(self, block: RowBlock) -> Scores:
        """Return the scores of a block of queries."""
        return self._replace(block=block)

    def tile(self, rows: range, columns: range) -> Tile:
        """Return the tile of `rows` and `columns`."""
        return Tile(rows, columns, self.grid, self.leading, self.block)

    def key_range(self, rows: range) -> range:
        """Return the keys that the queries of `rows` may attend, in one piece."""
        keys = range(self.grid.keys)
        return keys if self.options.is_unmasked else self.options.mask.key_range(self.tile(rows, keys))

    def tiles(self, rows: range, plan: Plan) -> Iterable[tuple[Tile, Allowed]]:
        """Return the tiles of `rows` in which some pair may attend, with the answer of the mask."""
        is_kept = self.answers is not None and not self.grid.is_traced and plan.is_one_tile
        if self.answers is None or not is_kept or math.prod(self.grid.shape) > MOST_ANSWERED:
            return self._tiles(rows, plan)
        if "tiles" not in self.answers:
            self.answers["tiles"] = [*self._tiles(rows, plan)]
        return cast(Iterable[tuple[Tile, Allowed]], self.answers["tiles"])

    def _tiles(self, rows: range, plan: Plan) -> Iterator[tuple[Tile, Allowed]]:
        for columns in plan.column_ranges(self.key_range(rows)):
            tile = self.tile(rows, columns)
            allowed = self.options.mask.allowed_in(tile)
            if allowed is not False:
                yield tile, allowed

    def trimmed_tiles(self, rows: range, plan: Plan) -> Iterator[tuple[Tile, Allowed]]:
        """Return the same tiles, without queries that attend to no key of the tile, if the mask knows them."""
        if self.options.is_unmasked:
            yield from ((self.tile(rows, columns), True) for columns in plan.column_ranges(range(plan.keys)))
            return
        for columns in plan.column_ranges(self.key_range(rows)):
            query_range = self.options.mask.query_range(self.tile(rows, columns))
            tile = self.tile(query_range, columns)
            allowed = self.options.mask.allowed_in(tile) if query_range else False
            if allowed is not False:
                yield tile, allowed

    def scaled_query(self, rows: range) -> Array:
        """Return the queries times the scale, (..., Hq, rows, E): once for each row, not for each tile."""
        query, is_whole = self.query, len(rows) == self.grid.queries and self.block is None
        # The whole query needs no slice, which would be an operation in a graph.
        query = query if is_whole else self.tile(rows, range(1)).slice_queries(query)
        if query.dtype != self.grid.dtype:
            query = self.xp.astype(query, self.grid.dtype)
        if isinstance(self.options.scale, float):
            return query * self.options.scale
        scale = self.tile(rows, range(1)).slice(self.options.scale)
        return query * self.xp.astype(scale, self.grid.dtype, copy=False)

    def keys(self, columns: range) -> Array:
        """Return the keys, (..., H, columns, E)."""
        return astype_if_needed(self.xp, self.key.slice_keys(columns), self.grid.dtype)

    def products(self, tile: Tile, query: Array) -> Array:
        """Return the soft-capped products of a `scaled_query` with the keys, (..., Hq, rows, columns)."""
        xp = self.grid.xp
        buffer = None if self.buffers is None else self.buffers.scores
        scores = matmul_grouped(xp, query, xp.matrix_transpose(self.keys(tile.columns)), buffer)
        if self.options.softcap is None:
            return scores
        if buffer is None:
            return xp.tanh(scores / self.options.softcap) * self.options.softcap
        scores /= self.options.softcap
        scores = buffer.functions.tanh(scores, out=scores)
        scores *= self.options.softcap
        return scores

    def masked(self, tile: Tile, query: Array, allowed: Allowed) -> tuple[Array, Allowed]:
        """Return the scores (..., Hq, rows, columns), -inf where a pair may not attend; and which pairs may."""
        scores = self.products(tile, query)
        if allowed is True and not self.options.biases:
            return scores, True
        return self.with_biases(tile, scores, allowed)

    def with_biases(self, tile: Tile, scores: Array, allowed: Allowed) -> tuple[Array, Allowed]:
        """Return `products` with the biases, -inf where a pair may not attend; and which pairs may.

        Each bias says itself which pairs it masks: the sum does not show it, since -inf + inf is NaN.
        """
        xp, dtype = self.xp, self.grid.dtype
        for bias in self.options.biases:
            scores, unmasked = bias.apply(tile, scores, in_place=self.buffers is not None)
            allowed = both(allowed, unmasked)
        if (
            len(self.options.biases) > 1
        ):  # two of the most negative finite numbers add up to -inf, and must not mask
            scores = xp.where(is_masked(scores), -LARGEST[dtype_name(dtype)], scores)
        if not isinstance(allowed, bool):
            scores = xp.where(allowed, scores, -math.inf)
        return scores, allowed
