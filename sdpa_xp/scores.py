"""The scores of a tile: scale -> softcap -> bias -> mask, in the accumulation dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdpa_xp.biases import Bias
from sdpa_xp.masks import AllOf, Allowed, both
from sdpa_xp.namespace import LARGEST, dtype_name
from sdpa_xp.protocols import Array, Device, Dtype, Namespace, Shape
from sdpa_xp.tiles import Tile


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What the scores of every pair follow from; nothing is computed until a tile is asked for.

    query (..., Hq, L, E), key (..., H, S, E), `batch` the leading axes that all inputs broadcast to,
    `dtype` the accumulation dtype.
    """

    xp: Namespace
    query: Array
    key: Array
    batch: Shape
    mask: AllOf
    biases: tuple[Bias, ...]
    scale: float | Array
    softcap: float | None
    dtype: Dtype
    device: Device
    traced: bool

    @property
    def unmasked(self) -> bool:
        """Whether every pair may attend, whatever the values."""
        return not (self.mask.masks or self.biases)

    def tile(self, rows: range, columns: range) -> Tile:
        """The tile of `rows` against `columns` of these scores."""
        return Tile(rows, columns, self.xp, self.device)

    def scaled_query(self, rows: range) -> Array:
        """Queries times the scale, (..., Hq, rows, E): scaled once, not once a key tile."""
        query = self.query[..., rows.start : rows.stop, :]
        query = self.xp.astype(query, self.dtype, copy=False)
        if isinstance(self.scale, float):
            return query * self.scale
        scale = self.tile(rows, range(1)).cut(self.scale)
        return query * self.xp.astype(scale, self.dtype, copy=False)

    def on(self, tile: Tile, query: Array, allowed: Allowed) -> tuple[Array, Allowed]:
        """Scores (..., Hq, rows, columns) of a `scaled_query`, -inf where a pair may not attend.

        Also the pairs that may: those of `allowed` that no bias masks. Each bias is asked by itself, since
        -inf + inf is NaN, and two of the smallest finite numbers add up to -inf without masking.
        """
        xp = self.xp
        key = self.key[..., tile.columns.start : tile.columns.stop, :]
        key = xp.astype(key, self.dtype, copy=False)
        scores = matmul_grouped(xp, query, xp.matrix_transpose(key))
        if self.softcap is not None:
            scores = xp.tanh(scores / self.softcap) * self.softcap
        for bias in self.biases:
            added = bias.on(tile, self.dtype)
            allowed = both(allowed, ~is_masked(added))
            scores = scores + added
        if len(self.biases) > 1:
            scores = xp.where(is_masked(scores), -LARGEST[dtype_name(self.dtype)], scores)
        if not isinstance(allowed, bool):
            scores = xp.where(allowed, scores, -math.inf)
        return scores, allowed


def is_masked(scores: Array) -> Array:
    """Where a score or a bias is -inf; a NaN is not."""
    return scores <= -math.inf


def matmul_grouped(xp: Namespace, rows: Array, shared: Array) -> Array:
    """rows (..., Hq, L, X) @ shared (..., H, X, Y) -> (..., Hq, L, Y); head h meets shared head h // G.

    The G = Hq // H heads of a group become rows of one product, so `shared` is never repeated.
    """
    heads, length, width = rows.shape[-3:]
    groups = shared.shape[-3]
    if heads == groups:
        return rows @ shared
    group = heads // groups
    # Split, then merge: Dask's reshape does one or the other. Both are views.
    split = xp.reshape(rows, (*rows.shape[:-3], groups, group, length, width))
    product = xp.reshape(split, (*rows.shape[:-3], groups, group * length, width)) @ shared
    *batch, _, _, columns = product.shape
    split = xp.reshape(product, (*batch, groups, group, length, columns))
    return xp.reshape(split, (*batch, heads, length, columns))
