"""A call whose mask lists the keys of each block of queries, computed as a call of many short sequences.

The blocks stand on the axis of the heads, and the heads on an axis of the batch: with P groups of G query heads
that share a key head and a list, queries (..., P, blocks, G * n, E) meet keys (..., P, blocks, m, E). So tiles,
softmax and threads are those of any call, and a tile is one product for all of its blocks. Queries are copied
once, and keys for each tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from .._libraries import library_of, namespace_of
from .._libraries.protocols import Array, Namespace
from .._tiles import (
    Allowed,
    ArraySource,
    KeyValueSource,
    LeadingSlice,
    Tile,
    TokenPositions,
    both,
    slice_leading,
)
from .._tiles.key_lists import KeyLists, Patches
from .._tiles.plan import Plan, plan_patches
from ..masks.algebra import AllOf, ArrayPattern, Pattern
from . import Scores


@dataclass(frozen=True, slots=True, eq=False)
class ListedBlocks:
    """Some blocks of some batch entries and heads."""

    lists: KeyLists
    leading: LeadingSlice
    """The ranges of the axes (..., P, blocks)."""
    heads: int
    """P."""

    def joined(self, compute: Callable[[LeadingSlice, Array, Allowed], Array]) -> Array:
        """Return what `compute` returns for each of the lists, joined along the axes (..., P).

        It gets slices of these axes, whose blocks have the same lists, the tokens of these, (blocks, m), and
        which of them are no padding.
        """
        *leading, blocks = self.leading
        lengths, count = (1,) * len(leading) + self.lists.shape, self.lists.queries.shape[0]

        def along(done: LeadingSlice, number: int) -> Array:
            axis, first = len(done), number * count
            if axis == len(leading):
                return compute(done, *self.lists.tokens(slice(first + blocks.start, first + blocks.stop)))
            length = lengths[axis - len(leading)]
            if length == 1:
                return along((*done, leading[axis]), number)
            group = self.heads // length if axis == len(leading) - 1 else 1
            parts = [along((*done, range(n, n + 1)), number * length + n // group) for n in leading[axis]]
            return parts[0] if len(parts) == 1 else namespace_of(parts[0]).concat(parts, axis=axis)

        return along((), 0)


@dataclass(frozen=True, slots=True, eq=False)
class ListedSource(KeyValueSource):
    """Keys or values of one array (..., H, S, width), read as (..., P, blocks, m, width)."""

    array: Array
    blocks: ListedBlocks

    @property
    def width(self) -> int:
        return self.array.shape[-1]

    @property
    def heads(self) -> int:
        return len(self.blocks.leading[-1])

    def slice_leading(self, leading: LeadingSlice) -> ListedSource:
        return replace(self, blocks=replace(self.blocks, leading=leading))

    def slice_keys(self, columns: range) -> Array:
        array, group = self.array, self.blocks.heads // self.array.shape[-3]

        def copied(done: LeadingSlice, tokens: Array, _is_real: Allowed) -> Array:
            *batch, heads = done
            part = slice_leading(array, (*batch, range(heads.start // group, -(-heads.stop // group))))
            # An array without batch axes is for all batch entries.
            part = part[(*[None] * (len(done) + 2 - part.ndim), ...)]
            return in_blocks(namespace_of(array), part, tokens[:, columns.start : columns.stop])

        return self.blocks.joined(copied)


@dataclass(frozen=True, slots=True, eq=False)
class ListedPairs(Pattern):
    """A pair may attend iff the key is no padding of a list, and in the other masks."""

    blocks: ListedBlocks
    positions: Array
    """Those of the queries, (blocks, rows, 1)."""
    others: Pattern

    def allowed_in(self, tile: Tile) -> Allowed:
        leading, xp = tile.leading or self.blocks.leading, tile.grid.xp
        queries = slice_leading(self.positions, leading[-1:])

        def allowed(done: LeadingSlice, tokens: Array, is_real: Allowed) -> Array:
            keys, of_list = tile.grid.in_all_axes(xp.expand_dims(tokens, axis=-2)), is_real
            if not isinstance(of_list, bool):
                of_list = tile.grid.in_all_axes(xp.expand_dims(of_list, axis=-2))
            places = TokenPositions(queries, keys)
            answer = both(of_list, self.others.allowed_in(tile._replace(leading=None, positions=places)))
            if isinstance(answer, bool):
                answer = xp.full((1, 1), answer, dtype=xp.bool, device=tile.grid.device)
            return xp.broadcast_to(answer, (*map(len, done), *queries.shape[-3:-1], tokens.shape[-1]))

        return replace(self.blocks, leading=leading).joined(allowed)


def in_blocks(xp: Namespace, array: Array, tokens: Array) -> Array:
    """Return tokens of an array (..., H, S, width) as (..., H, blocks, n, width)."""
    copied = library_of(array).take_tokens(array, xp.reshape(tokens, (-1,)))
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
    xp, grid, patches = scores.xp, scores.grid, cast(Patches, plan.patches)
    group, lists = patches.group(scores.group), patches.key_lists(grid)
    query, queries = in_blocks(xp, scores.query, lists.queries), lists.queries
    *batch, heads, blocks, rows, width = query.shape
    if group > 1:
        query = _swapped(xp, xp.reshape(query, (*batch, heads // group, group, blocks, rows, width)))
        query = xp.reshape(query, (*batch, heads // group, blocks, group * rows, width))
        queries = xp.concat([queries] * group, axis=-1)
    of_blocks = replace(
        grid,
        batch=(*grid.batch, grid.heads // group),
        heads=blocks,
        queries=group * rows,
        keys=patches.keys,
        is_2d=False,
    )
    every = ListedBlocks(lists, tuple(map(range, (*of_blocks.batch, blocks))), grid.heads // group)
    positions = of_blocks.in_all_axes(queries + cast(int, grid.position.values), 1)
    mask: Pattern = ListedPairs(every, positions, patches.others)
    if not lists.shape:
        # At once for all blocks, of which a tile has few: a pair is a byte, and a key is many.
        allowed = mask.allowed_in(Tile(range(group * rows), range(patches.keys), of_blocks))
        mask = AllOf(()) if isinstance(allowed, bool) else ArrayPattern(allowed)
    key, value = (ListedSource(cast(ArraySource, x).array, every) for x in (scores.key, value))
    plan = plan_patches(plan, grid, group, key.width + value.width)
    call = Scores(of_blocks, query, key, scores.options._replace(mask=mask))
    return PatchedCall(call, value, plan, lists.places, group)


def _swapped(xp: Namespace, array: Array) -> Array:
    """Return an array whose third and fourth axes from the end, the blocks and the group, are swapped."""
    *others, first, second, rows, width = range(array.ndim)
    return xp.permute_dims(array, (*others, second, first, rows, width))
