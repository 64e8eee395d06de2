"""The scores of a tile: scale -> softcap -> bias -> mask, in the accumulation dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdpa_xp.biases import SumOf
from sdpa_xp.masks import AllOf, Allowed, both
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
    bias: SumOf
    scale: float | Array
    softcap: float | None
    dtype: Dtype
    device: Device
    traced: bool

    @property
    def unmasked(self) -> bool:
        """Whether every pair may attend, whatever the values."""
        return not (self.mask.masks or self.bias.biases)

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

    def on(self, tile: Tile, query: Array, allowed: Allowed, *, careful: bool) -> tuple[Array, Allowed]:
        """Scores (..., Hq, rows, columns) of a `scaled_query`, -inf where a pair is not `allowed`.

        A bias of -inf masks by being added; only when `careful` are its pairs looked for, so that even a
        NaN score does not survive it. Returns the pairs that may attend after that, too.
        """
        xp = self.xp
        key = self.key[..., tile.columns.start : tile.columns.stop, :]
        key = xp.astype(key, self.dtype, copy=False)
        scores = matmul_grouped(xp, query, xp.matrix_transpose(key))
        if self.softcap is not None:
            scores = xp.tanh(scores / self.softcap) * self.softcap
        bias = self.bias.on(tile, self.dtype)
        if bias is not None:
            scores = scores + bias
            if careful:
                allowed = both(allowed, ~xp.equal(bias, xp.zeros_like(bias) - math.inf))
        if not isinstance(allowed, bool):
            scores = xp.where(allowed, scores, -math.inf)
        return scores, allowed


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
