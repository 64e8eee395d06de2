"""The scores of a tile: scale -> softcap -> bias -> mask, in the accumulation dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from sdpa_xp._libraries import LARGEST, astype_if_needed, dtype_name
from sdpa_xp._libraries.protocols import Array, Namespace
from sdpa_xp.biases.algebra import Term, is_masked
from sdpa_xp.dropout import Dropout
from sdpa_xp.masks.algebra import AllOf, Allowed, Pattern, both
from sdpa_xp.pairs import Block, Pairs
from sdpa_xp.sources import Source
from sdpa_xp.tiles import Part, Plan, Tile, cut_leading


class Scores(NamedTuple):
    """What the scores of every pair follow from; nothing is computed until a tile is asked for."""

    pairs: Pairs
    query: Array
    """(..., Hq, L, E)."""
    key: Source
    """(..., H, S, E)."""
    mask: Pattern
    biases: tuple[Term, ...]
    scale: float | Array
    softcap: float | None
    sinks: Array | None
    """A logit that joins the sum of each row and has no value, (..., Hq, 1, 1) in the accumulation dtype."""
    dropout: Dropout | None = None

    @property
    def xp(self) -> Namespace:
        return self.pairs.xp

    @property
    def unmasked(self) -> bool:
        """Whether every pair may attend, whatever the values."""
        return isinstance(self.mask, AllOf) and len(self.mask.patterns) == len(self.biases) == 0

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.query.shape[-3] // (self.key.heads or 1)

    def of(self, part: Part | None) -> Scores:
        """The scores of a part of the leading axes."""
        if part is None:
            return self
        pairs = replace(self.pairs, part=part)
        query = cut_leading(self.query, part)
        sinks = None if self.sinks is None else cut_leading(self.sinks, part)
        key = self.key.of(of_keys(part, self.group))
        return self._replace(pairs=pairs, query=query, key=key, sinks=sinks)

    def within(self, block: Block) -> Scores:
        """The scores of a block of queries."""
        return self._replace(pairs=replace(self.pairs, block=block))

    def tile(self, rows: range, columns: range) -> Tile:
        """The tile of `rows` against `columns` of these scores."""
        return Tile(rows, columns, self.pairs)

    def reach(self, rows: range) -> range:
        """The keys that queries of `rows` may attend at all."""
        keys = range(self.pairs.keys)
        return keys if self.unmasked else self.mask.reach(self.tile(rows, keys))

    def tiles(self, rows: range, plan: Plan) -> Iterator[tuple[Tile, Allowed]]:
        """The tiles of `rows` in which a pair may attend, and which pairs those are as far as the mask says."""
        for columns in plan.column_ranges(self.reach(rows)):
            tile = self.tile(rows, columns)
            allowed = self.mask.on(tile)
            if allowed is not False:
                yield tile, allowed

    def trimmed(self, rows: range, plan: Plan) -> Iterator[tuple[Tile, Allowed]]:
        """The same tiles, without those queries of each that the mask knows to attend none of its keys."""
        for columns in plan.column_ranges(self.reach(rows)):
            some = self.mask.reached_by(self.tile(rows, columns))
            tile = self.tile(some, columns)
            allowed = self.mask.on(tile) if some else False
            if allowed is not False:
                yield tile, allowed

    def scaled_query(self, rows: range) -> Array:
        """Queries times the scale, (..., Hq, rows, E): scaled once, not once a key tile."""
        query, whole = self.query, len(rows) == self.pairs.queries and self.pairs.block is None
        query = query if whole else self.tile(rows, range(1)).of_queries(query)
        query = astype_if_needed(self.xp, query, self.pairs.dtype)
        if isinstance(self.scale, float):
            return query * self.scale
        scale = self.tile(rows, range(1)).cut(self.scale)
        return query * self.xp.astype(scale, self.pairs.dtype, copy=False)

    def keys(self, columns: range) -> Array:
        """Keys, (..., H, columns, E)."""
        return astype_if_needed(self.xp, self.key.cut(columns), self.pairs.dtype)

    def capped(self, tile: Tile, query: Array) -> Array:
        """Products (..., Hq, rows, columns) of a `scaled_query`, after the soft cap."""
        xp = self.pairs.xp
        scores = matmul_grouped(xp, query, xp.matrix_transpose(self.keys(tile.columns)))
        return scores if self.softcap is None else xp.tanh(scores / self.softcap) * self.softcap

    def on(self, tile: Tile, query: Array, allowed: Allowed) -> tuple[Array, Allowed]:
        """Scores (..., Hq, rows, columns) of a `scaled_query`, -inf for all but the pairs that may attend."""
        scores = self.capped(tile, query)
        return self.biased(tile, scores, allowed) if self.biases or allowed is not True else (scores, True)

    def biased(self, tile: Tile, scores: Array, allowed: Allowed) -> tuple[Array, Allowed]:
        """`capped` scores with the biases, -inf where a pair may not attend.

        Also the pairs that may: those of `allowed` that no bias masks. Each bias is asked by itself, since
        -inf + inf is NaN, and two of the smallest finite numbers add up to -inf without masking.
        """
        xp, dtype = self.xp, self.pairs.dtype
        for bias in self.biases:
            scores, unmasked = bias.apply(tile, scores)
            allowed = both(allowed, unmasked)
        if len(self.biases) > 1:
            scores = xp.where(is_masked(scores), -LARGEST[dtype_name(dtype)], scores)
        if not isinstance(allowed, bool):
            scores = xp.where(allowed, scores, -math.inf)
        return scores, allowed


def matmul_grouped(xp: Namespace, rows: Array, shared: Array) -> Array:
    """rows (..., Hq, L, X) @ shared (..., H, X, Y) -> (..., Hq, L, Y); head h meets shared head h // G.

    The G = Hq // H heads of a group become rows of one product, so `shared` is never repeated.
    """
    if rows.shape[-3] == shared.shape[-3]:
        return rows @ shared
    heads, length, _ = rows.shape[-3:]
    product = folded(xp, rows, shared.shape[-3]) @ shared
    *batch, groups, _, columns = product.shape
    split = xp.reshape(product, (*batch, groups, heads // groups, length, columns))
    return xp.reshape(split, (*batch, heads, length, columns))


def matmul_over_group(xp: Namespace, left: Array, right: Array, groups: int) -> Array:
    """left (..., Hq, L, X)^T @ right (..., Hq, L, Y) -> (..., H, X, Y), summed over the heads of a group."""
    return xp.matrix_transpose(folded(xp, left, groups)) @ folded(xp, right, groups)


def folded(xp: Namespace, rows: Array, groups: int) -> Array:
    """(..., Hq, L, X) -> (..., H, G * L, X): the heads of a group one after the other."""
    *batch, heads, length, width = rows.shape
    if heads == groups:
        return rows
    group = heads // groups
    # Split, then merge: Dask's reshape does one or the other. Both are views.
    split = xp.reshape(rows, (*batch, groups, group, length, width))
    return xp.reshape(split, (*batch, groups, group * length, width))


def attended(xp: Namespace, allowed: Array, groups: int) -> Array:
    """Whether any query attends a key, (..., H, columns, 1), from pairs that broadcast to (..., Hq, L, S)."""
    if allowed.ndim < 2:  # the same for every query
        return xp.expand_dims(allowed, axis=-1) if allowed.ndim else allowed
    by_head = xp.any(allowed, axis=-2)
    if by_head.ndim >= 2 and by_head.shape[-2] not in (1, groups):
        *batch, heads, columns = by_head.shape
        by_head = xp.any(xp.reshape(by_head, (*batch, groups, heads // groups, columns)), axis=-2)
    return xp.expand_dims(by_head, axis=-1)


def of_keys(part: Part, group: int) -> Part:
    """The part of (..., H) that a part of (..., Hq) reads."""
    *batch, heads = part
    return (*batch, range(heads.start // group, heads.stop // group))
