"""Products and sums of one shape, so that the bits of a row depend on nothing that stands beside it.

A BLAS chooses its kernel by the shape of a product, and each kernel adds in an order of its own: a query alone
gets other last digits than among others. So every product here has one shape: `ROWS` queries against `KEYS`
keys, which begin at a multiple of `KEYS`. Missing keys are zeros. Missing rows are anything, since no row of a
product depends on another one.
"""

from __future__ import annotations

from .._checks.arrays import broadcast
from .._libraries.protocols import Array, Namespace, Shape
from .._run import fold_groups
from .._run.buffers import Buffer
from .._tiles.tuning import KEYS_OF_A_PRODUCT as KEYS
from .._tiles.tuning import ROWS_OF_A_PRODUCT as ROWS


def multiply_keys(xp: Namespace, query: Array, keys: Array, buffer: Buffer | None = None) -> Array:
    """Return query (..., Hq, L, E) @ keys (..., H, E, S) as (..., Hq, L, S), in the memory of `buffer`."""
    heads, length, columns = *query.shape[-3:-1], keys.shape[-1]
    rows = fold_groups(xp, query, keys.shape[-3])
    rows = _in_blocks(xp, rows, ROWS)
    tiles = [xp.matrix_transpose(tile) for tile in _key_tiles(xp, xp.matrix_transpose(keys))]
    blocks, count = rows.shape[-3], sum(tile.shape[-3] for tile in tiles)
    leading = broadcast(rows.shape[:-3], tiles[0].shape[:-3]) or ()
    memory = _memory(xp, query, (*leading, blocks * ROWS, count * KEYS), buffer)
    places = xp.reshape(memory, (*leading, blocks, ROWS, count, KEYS))
    places = xp.permute_dims(places, (*range(len(leading)), -2, -4, -3, -1))
    first = 0
    for tile in tiles:
        of_tile = places[..., first : first + tile.shape[-3], :, :, :]
        _multiply(xp.expand_dims(rows, axis=-4), xp.expand_dims(tile, axis=-3), of_tile, buffer)
        first += tile.shape[-3]
    group = heads // keys.shape[-3]
    product = memory[..., : group * length, :columns]
    return xp.reshape(product, (*leading[:-1], heads, length, columns))


def add_weighted(
    xp: Namespace,
    l: Array,
    o: Array,
    weights: Array,
    values: Array,
    buffer: Buffer | None = None,
    padding: Buffer | None = None,
) -> None:
    """Add the sums of weights (..., Hq, L, S) to l, and weights @ values (..., H, S, Ev) to o, tile after tile.

    `buffer` is memory for products, and `padding` for padded weights.
    """
    rows, tiles = fold_groups(xp, weights, values.shape[-3]), _key_tiles(xp, values)
    (number, keys), width = rows.shape[-2:], values.shape[-1]
    count, blocks = -(-keys // KEYS), -(-number // ROWS)
    rows = _with_room(xp, rows, (*rows.shape[:-2], blocks * ROWS, count * KEYS), padding)
    left = xp.reshape(rows, (*rows.shape[:-2], blocks, ROWS, count, KEYS))
    left = xp.permute_dims(left, (*range(left.ndim - 4), -2, -4, -3, -1))
    leading = broadcast(rows.shape[:-2], values.shape[:-2]) or ()
    parts = _memory(xp, weights, (count + 1, *leading, blocks * ROWS, width), buffer)
    places = xp.permute_dims(parts[1:, ...], (*range(1, len(leading) + 1), 0, -2, -1))
    places = xp.reshape(places, (*places.shape[:-2], blocks, ROWS, width))
    first = 0
    for tile in tiles:
        index = (..., slice(first, first + tile.shape[-3]), slice(None), slice(None), slice(None))
        _multiply(left[index], xp.expand_dims(tile, axis=-3), places[index], buffer)
        first += tile.shape[-3]
    _add_parts(xp, o, parts, number)
    # Of no more rows than there are: sums take longer than products with zeros.
    sums = xp.sum(xp.reshape(rows[..., :number, :], (*rows.shape[:-2], number, count, KEYS)), axis=-1)
    parts = xp.zeros((count + 1, *leading, blocks * ROWS, 1), dtype=l.dtype, device=None)
    xp.permute_dims(parts[1:, ..., :number, 0], (*range(1, len(leading) + 2), 0))[...] = sums
    _add_parts(xp, l, parts, number)


def _add_parts(xp: Namespace, total: Array, parts: Array, number: int) -> None:
    """Add `parts[1:]` (n, ..., H, rows, X), one after the other, to a total (..., Hq, L, X).

    `number` rows of the parts are those of the total. `parts[0]` is free.
    """
    heads, length, width = total.shape[-3:]
    key_heads = parts.shape[-3]
    by_group = xp.reshape(total, (*total.shape[:-3], key_heads, heads // key_heads, length, width))
    of_rows = parts[..., :number, :]
    of_rows = xp.reshape(of_rows, (*of_rows.shape[:-2], *by_group.shape[-3:]))
    of_rows[0, ...] = by_group
    # A sum over the first of several axes adds in its order, as there is more than one row.
    by_group[...] = xp.reshape(xp.sum(parts, axis=0)[..., :number, :], by_group.shape)


def _memory(xp: Namespace, like: Array, shape: Shape, buffer: Buffer | None) -> Array:
    if buffer is None:
        return xp.empty(shape, dtype=like.dtype, device=None)
    return buffer.array(shape)


def _multiply(left: Array, right: Array, out: Array, buffer: Buffer | None) -> None:
    """Write left @ right to `out`."""
    if buffer is None:
        out[...] = left @ right
    else:
        buffer.functions.matmul(left, right, out=out)


def _with_room(xp: Namespace, rows: Array, shape: Shape, buffer: Buffer | None) -> Array:
    """Return rows (..., L, S) in an array of `shape`, with zeros behind each row and anything in other rows."""
    if rows.shape == shape:
        return rows
    memory, (length, columns) = _memory(xp, rows, shape, buffer), rows.shape[-2:]
    memory[..., :length, :columns] = rows
    memory[..., :length, columns:] = 0.0
    return memory


def _key_tiles(xp: Namespace, array: Array) -> list[Array]:
    """Return (..., S, X) in tiles (..., n, KEYS, X): the whole ones, and the last one padded."""
    keys = array.shape[-2]
    whole = keys - keys % KEYS
    parts = [array[..., :whole, :], array[..., whole:, :]] if 0 < whole < keys else [array]
    return [_in_blocks(xp, part, KEYS) for part in parts]


def _in_blocks(xp: Namespace, array: Array, size: int) -> Array:
    """Return (..., n, X) in blocks (..., blocks, size, X); zeros fill the last one."""
    *leading, length, width = array.shape
    blocks = -(-length // size)
    if length % size:
        padded = xp.zeros((*leading, blocks * size, width), dtype=array.dtype, device=None)
        padded[..., :length, :] = array
        array = padded
    return xp.reshape(array, (*leading, blocks, size, width))
