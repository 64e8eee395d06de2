"""Products and sums of one shape, so that the bits of a row depend on nothing that stands beside it.

A BLAS chooses its kernel by the shape of a product, and each kernel adds in an order of its own: a query alone
gets other last digits than among others. So every product here has one shape: `ROWS` queries against `KEYS`
keys, which begin at a multiple of `KEYS`. Missing rows and keys are zeros.
"""

from __future__ import annotations

from sdpa_xp._checks.arrays import broadcast
from sdpa_xp._core.products import Buffer, fold_groups
from sdpa_xp._libraries.protocols import Array, Namespace, Shape
from sdpa_xp._tiles.plan import KEYS_OF_A_PRODUCT as KEYS
from sdpa_xp._tiles.plan import ROWS_OF_A_PRODUCT as ROWS


def multiply_keys(xp: Namespace, query: Array, keys: Array, buffer: Buffer | None = None) -> Array:
    """Return query (..., Hq, L, E) @ keys (..., H, E, S) as (..., Hq, L, S), in the memory of `buffer`."""
    heads, length, columns = *query.shape[-3:-1], keys.shape[-1]
    rows = xp.expand_dims(_row_blocks(xp, query, keys.shape[-3]), axis=-4)
    tiles = [xp.matrix_transpose(tile) for tile in _key_tiles(xp, xp.matrix_transpose(keys))]
    blocks, count = rows.shape[-3], sum(tile.shape[-4] for tile in tiles)
    leading = broadcast(rows.shape[:-4], tiles[0].shape[:-4]) or ()
    shape = (*leading, blocks * ROWS, count * KEYS)
    memory = _memory(xp, query, shape, buffer)
    places = xp.reshape(memory, (*leading, blocks, ROWS, count, KEYS))
    places = xp.permute_dims(places, (*range(len(leading)), -2, -4, -3, -1))
    first = 0
    for tile in tiles:
        _multiply(rows, tile, places[..., first : first + tile.shape[-4], :, :, :], buffer)
        first += tile.shape[-4]
    return _by_head(xp, memory, heads, length)[..., :columns]


def add_weighted(
    xp: Namespace, total: Array, weights: Array, values: Array, buffer: Buffer | None = None
) -> None:
    """Add weights (..., Hq, L, S) @ values (..., H, S, Ev) to a total (..., Hq, L, Ev), tile after tile."""
    key_heads = values.shape[-3]
    rows = _row_blocks(xp, weights, key_heads)
    *leading, heads, length, width = total.shape
    # The products of a tile need no copy in this shape.
    by_group = xp.reshape(total, (*leading, key_heads, heads // key_heads, length, width))
    first = 0
    for tiles in _key_tiles(xp, values):
        count = tiles.shape[-4]
        part = _padded(xp, rows[..., first : first + count * KEYS], count * KEYS, -1)
        part = xp.reshape(part, (*part.shape[:-1], count, KEYS))
        left = xp.permute_dims(part, (*range(part.ndim - 4), -2, -4, -3, -1))
        shape = (*(broadcast(left.shape[:-4], tiles.shape[:-4]) or ()), *left.shape[-4:-1], width)
        product = _multiply(left, tiles, _memory(xp, weights, shape, buffer), buffer)
        # Not -1, which is ambiguous if the width is 0.
        product = xp.reshape(product, (*product.shape[:-3], product.shape[-3] * ROWS, width))
        product = product[..., : heads // key_heads * length, :]
        product = xp.reshape(product, (*product.shape[:-2], heads // key_heads, length, width))
        for number in range(count):
            by_group += product[..., number, :, :, :]
        first += count * KEYS


def add_sums(xp: Namespace, total: Array, weights: Array) -> None:
    """Add the sums (..., 1) of weights (..., S) to a total, tile after tile."""
    *leading, keys = weights.shape
    whole = keys - keys % KEYS
    if whole:
        sums = xp.sum(xp.reshape(weights[..., :whole], (*leading, whole // KEYS, KEYS)), axis=-1, keepdims=True)
        for number in range(whole // KEYS):
            total += sums[..., number, :]
    if whole < keys:
        total += xp.sum(_padded(xp, weights[..., whole:], KEYS, -1), axis=-1, keepdims=True)


def _memory(xp: Namespace, like: Array, shape: Shape, buffer: Buffer | None) -> Array:
    if buffer is None:
        return xp.empty(shape, dtype=like.dtype, device=None)
    return buffer.array(shape)


def _multiply(left: Array, right: Array, out: Array, buffer: Buffer | None) -> Array:
    """Write left @ right to `out`, and return it."""
    if buffer is None:
        out[...] = left @ right
        return out
    return buffer.functions.matmul(left, right, out=out)


def _row_blocks(xp: Namespace, rows: Array, key_heads: int) -> Array:
    """Return rows (..., Hq, L, X) as (..., H, n, ROWS, X): the heads of a group one after the other."""
    folded = fold_groups(xp, rows, key_heads)
    *leading, count, width = folded.shape
    blocks = -(-count // ROWS)
    return xp.reshape(_padded(xp, folded, blocks * ROWS, -2), (*leading, blocks, ROWS, width))


def _key_tiles(xp: Namespace, array: Array) -> list[Array]:
    """Return (..., S, X) in tiles (..., n, 1, KEYS, X): the whole ones, and the last one padded."""
    *leading, keys, width = array.shape
    whole = keys - keys % KEYS
    parts = [array[..., :whole, :]] if whole else []
    if whole < keys:
        parts.append(_padded(xp, array[..., whole:, :], KEYS, -2))
    return [xp.reshape(part, (*leading, part.shape[-2] // KEYS, 1, KEYS, width)) for part in parts]


def _padded(xp: Namespace, array: Array, length: int, axis: int) -> Array:
    """Return an array with zeros behind it up to a length along an axis."""
    missing = length - array.shape[axis]
    if not missing:
        return array
    shape = [*array.shape]
    shape[axis] = missing
    zero = xp.zeros_like(array[(..., *[slice(1)] * -axis)])
    return xp.concat([array, xp.broadcast_to(zero, tuple(shape))], axis=axis)


def _by_head(xp: Namespace, product: Array, heads: int, length: int) -> Array:
    """Return rows (..., H, n, X), the last of which may be padding, as (..., Hq, L, X)."""
    *leading, key_heads, rows, width = product.shape
    group = heads // key_heads
    if rows > group * length:
        product = product[..., : group * length, :]
    if group == 1:
        return product
    split = xp.reshape(product, (*leading, key_heads, group, length, width))
    return xp.reshape(split, (*leading, heads, length, width))
