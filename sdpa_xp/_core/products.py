"""The keys and values of a tile, the products with them, their memory, and what keeps NaN and inf out of them.

Keys and values are not copied for the query heads that share them.

The scores of a tile are half a MB. If they were a new array for each tile, the C library would give that memory
back to the system after the tile and ask for it again: in a short call the page faults take as long as the
products. So buffers outlive their call, too: about one MB for each thread, three after calls of packed
sequences, which are stacked there, and up to 6 MB after calls of a paged cache, whose tiles are larger.

A masked key or value may be NaN, and a weight of zero does not keep it out, because 0 * NaN is NaN. A check of
each pair costs three more products. So the eager path first computes without a guard. If the output contains
NaN or inf, the affected rows are computed again with the guard "pairs".
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import add
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

from .._libraries import JETS, astype_if_needed, library_of, namespace_of, rows_in_blocks
from .._libraries.protocols import Array, InPlaceFunctions, Namespace, Shape
from .._tiles.placement import FAR
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import Allowed, LeadingSlice, slice_leading

MOST_IDLE = 64
"""Sets of buffers that are kept between calls: one for each thread of a large machine."""
_IDLE: dict[Hashable, list[TileBuffers]] = {}
"""Buffers that no call uses, by library, dtype and device."""
MOST_ROWS_ALONE, LEAST_KEYS_ALONE = 7, 512
"""Up to so many rows of a head are multiplied with so many keys or more one by one: see `multiply_few_rows`."""
MOST_VIEWS = 16
"""Shapes of arrays in a buffer that are remembered; packed sequences have many."""


class Buffer:
    """Memory for one array at a time."""

    def __init__(self, grid: ScoreGrid) -> None:
        self.xp, self.dtype, self.device = grid.xp, grid.dtype, grid.device
        self.functions = cast(InPlaceFunctions, grid.library.functions)
        self.memory = self._empty(0)
        self.views: dict[Shape, Array] = {}
        """The memory as arrays. A call has tiles of few shapes."""

    def array(self, shape: Shape) -> Array:
        """Return an array of `shape` with arbitrary elements, in the memory of the array before it."""
        if shape in self.views:
            return self.views[shape]
        size = math.prod(shape)
        if self.memory.shape[0] < size or len(self.views) == MOST_VIEWS:
            self.views.clear()
            self.memory = self.memory if self.memory.shape[0] >= size else self._empty(size)
        view = self.views[shape] = self.xp.reshape(self.memory[:size], shape)
        return view

    def _empty(self, size: int) -> Array:
        return self.xp.empty((size,), dtype=self.dtype, device=self.device)

    def stack(self, arrays: Sequence[Array]) -> Array:
        """Return arrays of one shape on a new first axis."""
        return self.functions.stack(arrays, out=self.array((len(arrays), *arrays[0].shape)))

    def matmul(self, left: Array, right: Array) -> Array:
        """Return left @ right, which have the same leading axes."""
        shape = (*left.shape[:-1], right.shape[-1])
        # No call of `array` where the shape is known: every tile would make two.
        out = self.views[shape] if shape in self.views else self.array(shape)
        return self.functions.matmul(left, right, out=out)


class TileBuffers:
    """The buffers of one thread."""

    def __init__(self, grid: ScoreGrid) -> None:
        self.scores, self.product, self.tangent = Buffer(grid), Buffer(grid), Buffer(grid)
        self.query, self.key, self.value = Buffer(grid), Buffer(grid), Buffer(grid)
        self.column = grid.xp.zeros((0, 1), dtype=grid.dtype, device=grid.device)

    def ones(self, least: int) -> Array:
        """Return a column of at least as many ones."""
        if self.column.shape[0] < least:
            scores = self.scores
            self.column = scores.xp.full((least, 1), 1.0, dtype=scores.dtype, device=scores.device)
        return self.column


class CallBuffers(threading.local):
    """The buffers of a call: each thread has its own set."""

    def __init__(self, grid: ScoreGrid, idle: list[TileBuffers], used: list[TileBuffers]) -> None:
        try:
            buffers = idle.pop()
        except IndexError:  # pop at once: after a check, another thread could take the last one
            buffers = TileBuffers(grid)
        used.append(buffers)
        self.scores = buffers.scores
        """(..., Hq, rows, columns)."""
        self.product = buffers.product
        """The weights of a tile times its values, (..., Hq, rows, Ev)."""
        self.tangent = buffers.tangent
        """The cotangent of the weights, or other numbers of each pair, (..., Hq, rows, columns)."""
        self.query, self.key, self.value = buffers.query, buffers.key, buffers.value
        """Stacked sequences of a packed batch, (n, heads, length, width). Nothing else is written there, since
        they are inputs, and a call may be computed twice."""
        self.ones, self.functions = buffers.ones, buffers.scores.functions


@contextmanager
def call_buffers(grid: ScoreGrid) -> Iterator[CallBuffers]:
    """Lend buffers to a call. A nested call, from a function of the caller, gets other buffers."""
    keeps = grid.library.keeps_buffers
    idle = _IDLE.setdefault((grid.library, grid.dtype, grid.device), []) if keeps else []
    used: list[TileBuffers] = []
    yield CallBuffers(grid, idle, used)
    # Not after an exception: another thread may still compute in its buffers.
    idle += used[: MOST_IDLE - len(idle)]


FactoredSlices: TypeAlias = tuple[Callable[[range], Array], Callable[[range], Array] | None]
"""What `KeyValueSource.factored_slices` returns."""


class KeyValueSource(Protocol):
    """The keys or the values of a call. They are read tile by tile, and all of them are never one copy."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    def slice_leading(self, leading: LeadingSlice) -> KeyValueSource:
        """Return the part for some batch entries and heads, (..., H)."""

    def slice_keys(self, columns: range) -> Array:
        """Return (..., H, columns, width)."""

    def slices(self, grid: ScoreGrid, *, transposed: bool = False) -> Callable[[range], Array]:
        """Return a function of `columns`, which returns them in the dtype of the grid, or also transposed.

        What does not depend on the columns is done once.
        """

    def factored_slices(self, grid: ScoreGrid, *, transposed: bool = False) -> FactoredSlices:
        """Return `slices` without a factor of each key, and a function of `columns` that returns the factors.

        The factors are (..., H, 1, columns); None in place of their function is 1.
        """


class ArraySource(NamedTuple):
    """One array, (..., H, S, width)."""

    array: Array

    @property
    def width(self) -> int:
        return self.array.shape[-1]

    @property
    def heads(self) -> int:
        return self.array.shape[-3]

    def slice_leading(self, leading: LeadingSlice) -> ArraySource:
        return ArraySource(slice_leading(self.array, leading))

    def slice_keys(self, columns: range) -> Array:
        array = self.array
        is_whole = columns.stop == FAR or columns.stop - columns.start == array.shape[-2]
        return array if is_whole else array[..., columns.start : columns.stop, :]

    def slices(self, grid: ScoreGrid, *, transposed: bool = False) -> Callable[[range], Array]:
        if self.array.dtype != grid.dtype:  # tile by tile, so that no wide copy of all keys exists
            return converted(self, grid, transposed)
        if not transposed:
            return self.slice_keys
        array = grid.xp.matrix_transpose(self.array)
        whole = range(self.array.shape[-2]) if grid.placement is None else range(FAR)
        # The whole array needs no slice, which would be an operation in a graph.
        return lambda columns: array if columns == whole else array[..., columns.start : columns.stop]

    def factored_slices(self, grid: ScoreGrid, *, transposed: bool = False) -> FactoredSlices:
        return self.slices(grid, transposed=transposed), None


class PagedSource(NamedTuple):
    """Blocks of a pool (blocks, H, size, width), for n sequences of equal lengths."""

    pool: Array
    block_tables: Sequence[Sequence[int]] | Array
    """The blocks of each sequence, in order; on a device an int32 array (n, blocks)."""

    @property
    def width(self) -> int:
        return self.pool.shape[-1]

    @property
    def heads(self) -> int:
        return self.pool.shape[-3]

    def slice_leading(self, leading: LeadingSlice) -> PagedSource:
        sequences, heads = leading
        return PagedSource(
            self.pool[:, heads.start : heads.stop, ...], self.block_tables[sequences.start : sequences.stop]
        )

    def slice_keys(self, columns: range) -> Array:
        """Return (n, H, columns, width): a view of one block, or a copy of several."""
        size = self.pool.shape[-2]
        first, start = divmod(columns.start, size)
        stop = start + len(columns)
        last = -(-columns.stop // size)
        if not isinstance(self.block_tables, Sequence):
            tables = self.block_tables[:, first:last]
            return rows_in_blocks(self.pool, tables)[..., start:stop, :]
        blocks = [row[first:last] for row in self.block_tables]
        if len(blocks) == len(blocks[0]) == 1:
            return self.pool[blocks[0][0] : blocks[0][0] + 1, :, start:stop, :]
        return rows_in_blocks(self.pool, blocks)[..., start:stop, :]

    def slices(self, grid: ScoreGrid, *, transposed: bool = False) -> Callable[[range], Array]:
        return converted(self, grid, transposed)

    def factored_slices(self, grid: ScoreGrid, *, transposed: bool = False) -> FactoredSlices:
        return self.slices(grid, transposed=transposed), None


def converted(source: KeyValueSource, grid: ScoreGrid, transposed: bool) -> Callable[[range], Array]:
    """Return `slices` of a source that copies or converts the keys of each tile."""
    xp, dtype = grid.xp, grid.dtype
    if transposed:
        return lambda columns: xp.matrix_transpose(astype_if_needed(xp, source.slice_keys(columns), dtype))
    return lambda columns: astype_if_needed(xp, source.slice_keys(columns), dtype)


def product_of(xp: Any, left: Array, right: Array) -> Array:
    """Return left @ right: by a function for jets, because a compiler traces no such operator of theirs."""
    product: Array = xp.matmul(left, right) if xp.__name__[:4] == JETS else left @ right
    return product


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
        product = product_of(xp, left, shared)
    else:
        product = buffer.matmul(left, shared)
    if not is_grouped:
        return product
    *batch, key_heads, _, columns = product.shape
    split = xp.reshape(product, (*batch, key_heads, heads // key_heads, length, columns))
    return xp.reshape(split, (*batch, heads, length, columns))


def multiply_few_rows(
    xp: Namespace, rows: Array, transposed_keys: Array, buffer: Buffer | None = None
) -> Array:
    """Return what `matmul_grouped` returns: each row alone is multiplied with the keys, which are not copied.

    OpenBLAS 0.3.31 copies the keys for a product with a few rows, but not for one row. With 1,024 keys, E = 64
    or 128, 4 rows take 0.35 times as long with AVX-512, and 0.75 to 0.9 times with AVX2; 7 rows 0.5 to 0.55 and
    0.8 times; 8 rows 0.6 and 1.1 to 1.2 times (one core, Zen 4, float32).
    """
    left, columns = fold_groups(xp, rows, transposed_keys.shape[-3]), transposed_keys.shape[-1]
    keys, vectors = xp.expand_dims(xp.matrix_transpose(transposed_keys), axis=-3), xp.expand_dims(left, axis=-1)
    if buffer is None or left.shape[:-2] != transposed_keys.shape[:-2]:
        product = keys @ vectors
    else:
        out = xp.expand_dims(buffer.array((*left.shape[:-1], columns)), axis=-1)
        product = buffer.functions.matmul(keys, vectors, out=out)
    return xp.reshape(product, (*product.shape[:-4], *rows.shape[-3:-1], columns))


def are_few_rows(rows: Array, key_heads: int, keys: int) -> bool:
    """Return whether `multiply_few_rows` is faster: some rows for each head of the keys, and many keys."""
    is_few: bool = key_heads < rows.shape[-3] * rows.shape[-2] <= MOST_ROWS_ALONE * key_heads
    return is_few and keys >= LEAST_KEYS_ALONE


def matmul_over_group(xp: Namespace, key_heads: int, left: Array, right: Array) -> Array:
    """Return left (..., Hq, L, X)^T @ right (..., Hq, L, Y) summed over each group, (..., H, X, Y)."""
    transposed = xp.matrix_transpose(fold_groups(xp, left, key_heads))
    return product_of(xp, transposed, fold_groups(xp, right, key_heads))


def fold_groups(xp: Namespace, rows: Array, key_heads: int) -> Array:
    """Return (..., Hq, L, X) as (..., H, G * L, X): the heads of a group one after the other."""
    *batch, heads, length, width = rows.shape
    if heads == key_heads:
        return rows
    group = heads // key_heads
    library = library_of(rows)
    if library.copies_open_views and not library.is_known(length):
        return xp.concat([rows[..., n::group, :, :] for n in range(group)], axis=-2)
    # Two steps, because not every lazy library can split and merge axes in one reshape. Both are views.
    split = xp.reshape(rows, (*batch, key_heads, group, length, width))
    return xp.reshape(split, (*batch, key_heads, group * length, width))


def multiply_columns(xp: Namespace, rows: Array, factors: Array, *, in_place: bool) -> Array:
    """Return rows (..., Hq, L, X) times factors (..., H, 1, X), which the heads of a group share."""
    *batch, heads, length, columns = rows.shape
    key_heads, split = factors.shape[-3], rows
    if heads != key_heads:
        split = xp.reshape(rows, (*batch, key_heads, heads // key_heads, length, columns))
        factors = xp.expand_dims(factors, axis=-3)
    if in_place:
        split *= factors
    else:
        split = split * factors
    return split if heads == key_heads else xp.reshape(split, (*split.shape[:-4], heads, length, columns))


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
    return (*batch, range(heads.start // group, -(-heads.stop // group)))


NonfiniteGuard: TypeAlias = Literal["none", "columns", "pairs"]
"""What `weigh` keeps out of its product.

"none": nothing. "columns": the values that no query of the tile attends to, which is all that a traced graph
can afford. "pairs": every value that a masked pair would bring in.
"""


def weigh(
    xp: Namespace, p: Array, value: Array, allowed: Allowed, guard: NonfiniteGuard, buffer: Buffer | None = None
) -> Array:
    """Return p @ value over the pairs that may attend; without a guard, in the memory of `buffer`."""
    if guard == "none" or isinstance(allowed, bool):
        return matmul_grouped(xp, p, value, buffer)
    if guard == "columns":
        attended = any_query_attends(xp, allowed, value.shape[-3])
        return matmul_grouped(xp, p, xp.where(attended, value, 0.0))
    weigh_pairs: Callable[[Array, Array], Array] = partial(_weigh_pairs, xp, allowed)
    return cast(Array, library_of(value).bilinear(weigh_pairs, p, value))


def _weigh_pairs(xp: Namespace, allowed: Array, p: Array, value: Array) -> Array:
    """Return p @ value over the pairs that may attend, whatever the values of others are."""
    product = matmul_grouped(xp, p, xp.where(xp.isfinite(value), value, 0.0))
    attends = xp.astype(xp.broadcast_to(allowed, p.shape), p.dtype)
    specials = {math.nan: xp.isnan(value), math.inf: value >= math.inf, -math.inf: value <= -math.inf}
    for special, is_special in specials.items():
        # The product counts the special values that a row attends: it gets them if there is one, whatever p is.
        meets = matmul_grouped(xp, attends, xp.astype(is_special, p.dtype)) > 0.0
        product = xp.where(meets, product + special, product)
    return product


def is_finite(xp: Namespace, arrays: Sequence[Array]) -> bool:
    """Return whether no array has a NaN or inf; if Ev = 0, only the sums l of the rows show it."""
    return bool(xp.isfinite(checksum(xp, arrays)))


def are_finite(checksums: Sequence[Array]) -> list[bool]:
    """Return whether each of some checksums (1, 1) is finite; a device is waited for once."""
    xp = namespace_of(checksums[0])
    joined = xp.reshape(checksums[0] if len(checksums) == 1 else xp.concat(checksums, axis=0), (-1,))
    flags: list[bool] = library_of(joined).to_list(xp.isfinite(joined))
    return flags


def checksum(xp: Namespace, arrays: Sequence[Array]) -> Array:
    """Return a number that is NaN or inf if an array has one."""
    return reduce(add, [xp.sum(array) for array in arrays])
