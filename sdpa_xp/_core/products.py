"""Matrix products of grouped heads; keys and values are not copied for the query heads that share them."""

from __future__ import annotations

from sdpa_xp._core.tile_buffers import Buffer
from sdpa_xp._libraries.protocols import Array, Namespace
from sdpa_xp._tiles.tile import LeadingSlice


def matmul_grouped(xp: Namespace, rows: Array, shared: Array, buffer: Buffer | None = None) -> Array:
    """Return rows (..., Hq, L, X) @ shared (..., H, X, Y), (..., Hq, L, Y); head h meets shared head h // G.

    The G = Hq // H heads of a group become rows of one product, so `shared` is never repeated. The product is
    in the memory of `buffer`, if there is one.
    """
    heads, length, _ = rows.shape[-3:]
    is_grouped = heads != shared.shape[-3]
    left = fold_groups(xp, rows, shared.shape[-3]) if is_grouped else rows
    # Leading axes that broadcast are rare, and their product is larger than either side.
    if buffer is None or left.shape[:-2] != shared.shape[:-2]:
        product = left @ shared
    else:
        product = buffer.matmul(left, shared)
    if not is_grouped:
        return product
    *batch, key_heads, _, columns = product.shape
    split = xp.reshape(product, (*batch, key_heads, heads // key_heads, length, columns))
    return xp.reshape(split, (*batch, heads, length, columns))


def matmul_over_group(xp: Namespace, left: Array, right: Array, key_heads: int) -> Array:
    """Return left (..., Hq, L, X)^T @ right (..., Hq, L, Y) summed over each group, (..., H, X, Y)."""
    return xp.matrix_transpose(fold_groups(xp, left, key_heads)) @ fold_groups(xp, right, key_heads)


def fold_groups(xp: Namespace, rows: Array, key_heads: int) -> Array:
    """Return (..., Hq, L, X) as (..., H, G * L, X): the heads of a group one after the other."""
    *batch, heads, length, width = rows.shape
    if heads == key_heads:
        return rows
    group = heads // key_heads
    # Two steps, because not every lazy library can split and merge axes in one reshape. Both are views.
    split = xp.reshape(rows, (*batch, key_heads, group, length, width))
    return xp.reshape(split, (*batch, key_heads, group * length, width))


def any_query_attends(xp: Namespace, allowed: Array, key_heads: int) -> Array:
    """Return whether a query attends to each key, (..., H, columns, 1), from `allowed` (..., Hq, L, S)."""
    if allowed.ndim < 2:  # the same for every query
        return xp.expand_dims(allowed, axis=-1) if allowed.ndim else allowed
    by_head = xp.any(allowed, axis=-2)
    if by_head.ndim >= 2 and by_head.shape[-2] not in (1, key_heads):
        *batch, heads, columns = by_head.shape
        by_head = xp.any(xp.reshape(by_head, (*batch, key_heads, heads // key_heads, columns)), axis=-2)
    return xp.expand_dims(by_head, axis=-1)


def key_leading_slice(leading: LeadingSlice, group: int) -> LeadingSlice:
    """Return the slice of (..., H) that a slice of (..., Hq) reads."""
    *batch, heads = leading
    return (*batch, range(heads.start // group, heads.stop // group))
