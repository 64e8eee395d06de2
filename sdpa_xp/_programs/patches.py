"""A call whose mask lists the keys of each block of queries, computed as a call of many short sequences.

The blocks stand on the axis of the heads, and the heads on an axis of the batch: with G query heads for each
key head, queries (..., H, blocks, G * n, E) meet keys (..., H, blocks, m, E). So tiles, softmax and threads are
those of any call, and a tile is one product for all of its blocks. Queries are copied once, and keys for each
tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from .._libraries import namespace_of
from .._libraries.protocols import Array, Namespace
from .._sources import ArraySource, KeyValueSource
from .._tiles.plan import Patches, Plan, plan_patches
from .._tiles.tile import LeadingSlice, Tile, TokenPositions, slice_leading
from ..masks.patterns import AllOf, ArrayPattern
from .scores import Scores


@dataclass(frozen=True, slots=True, eq=False)
class ListedSource(KeyValueSource):
    """Keys or values of one array (..., H, S, width), read as (..., H, blocks, m, width)."""

    array: Array
    tokens: Array
    """Those of each block, (blocks, m)."""

    @property
    def width(self) -> int:
        return self.array.shape[-1]

    @property
    def heads(self) -> int:
        return self.tokens.shape[0]

    def slice_leading(self, leading: LeadingSlice) -> ListedSource:
        *others, blocks = leading
        return ListedSource(slice_leading(self.array, (*others,)), self.tokens[blocks.start : blocks.stop, :])

    def slice_keys(self, columns: range) -> Array:
        return in_blocks(namespace_of(self.array), self.array, self.tokens[:, columns.start : columns.stop])


def in_blocks(xp: Namespace, array: Array, tokens: Array) -> Array:
    """Return tokens of an array (..., H, S, width) as (..., H, blocks, n, width)."""
    copied = xp.take(array, xp.reshape(tokens, (-1,)), axis=-2)
    return xp.reshape(copied, (*array.shape[:-2], *tokens.shape, array.shape[-1]))


class PatchedCall(NamedTuple):
    """A call of blocks, and where the results belong."""

    scores: Scores
    value: KeyValueSource
    plan: Plan
    places: Array
    """(L,)."""
    group: int

    def slice_leading(self, leading: LeadingSlice) -> PatchedCall:
        """Return some blocks of some heads and batch entries, as one tile."""
        plan = replace(self.plan, leading_slices=())
        return self._replace(
            scores=self.scores.slice_leading(leading), value=self.value.slice_leading(leading), plan=plan
        )

    def in_order(self, results: Sequence[Array]) -> Array:
        """Return results (..., H, blocks, G * n, width) as (..., Hq, L, width)."""
        xp = self.scores.xp
        result = results[0] if len(results) == 1 else xp.concat(results, axis=-3)
        *batch, heads, blocks, rows, width = result.shape
        if self.group > 1:
            rows //= self.group
            by_group = xp.reshape(result, (*batch, heads, blocks, self.group, rows, width))
            result = _swapped(xp, by_group)
            heads *= self.group
        return xp.take(xp.reshape(result, (*batch, heads, blocks * rows, width)), self.places, axis=-2)


def in_patches(scores: Scores, value: KeyValueSource, plan: Plan) -> PatchedCall:
    """Return the call of the blocks of a call, whose plan has patches."""
    xp, grid, group, patches = scores.xp, scores.grid, scores.group, cast(Patches, plan.patches)
    lists = patches.lists(grid)
    query, queries = in_blocks(xp, scores.query, lists.queries), lists.queries
    *batch, heads, blocks, rows, width = query.shape
    if group > 1:
        query = _swapped(xp, xp.reshape(query, (*batch, heads // group, group, blocks, rows, width)))
        query = xp.reshape(query, (*batch, heads // group, blocks, group * rows, width))
        queries = xp.concat([queries] * group, axis=-1)
    key_heads = grid.heads // group
    of_blocks = replace(
        grid, batch=(*grid.batch, key_heads), heads=blocks, queries=group * rows, keys=patches.keys, is_2d=False
    )
    positions = TokenPositions(
        of_blocks.in_all_axes(queries, 1), of_blocks.in_all_axes(xp.expand_dims(lists.keys, axis=-2))
    )
    # At once for all blocks, of which a tile has few: a pair is a byte, and a key is many.
    every = Tile(range(of_blocks.queries), range(of_blocks.keys), of_blocks, positions=positions)
    allowed = scores.options.mask.allowed_in(every)
    mask = AllOf(()) if isinstance(allowed, bool) else ArrayPattern(allowed)
    options = scores.options._replace(mask=mask)
    key, value = (ListedSource(cast(ArraySource, x).array, lists.keys) for x in (scores.key, value))
    plan = plan_patches(plan, grid, group, key.width + value.width)
    return PatchedCall(Scores(of_blocks, query, key, options), value, plan, lists.places, group)


def _swapped(xp: Namespace, array: Array) -> Array:
    """Return an array whose third and fourth axes from the end, the blocks and the group, are swapped."""
    *others, first, second, rows, width = range(array.ndim)
    return xp.permute_dims(array, (*others, second, first, rows, width))
