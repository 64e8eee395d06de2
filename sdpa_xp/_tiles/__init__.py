"""The grid of scores of a call, and the tiles that it is cut into: what masks and biases are asked about.

    grid             L queries x S keys for each query head; what masks and biases ask of it
    on_device        what a grid knows of a device
    plan, tuning     how the grid is cut, and the numbers that were measured
    modifier         what masks and biases have in common, and the arrays in them

Here is a tile: a range of queries against a range of keys; and its part of other arrays, and of the keys and
values. These are not copied for the query heads that share them. Nothing in this folder computes a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeAlias

from .._checks.score_arrays import Integers
from .._libraries import astype_if_needed, library_of, namespace_of
from .._libraries.protocols import Array, Dtype, Shape
from .grid import AT_FIRST_KEY, FAR, ScoreGrid, WindowBounds

LeadingSlice: TypeAlias = tuple[range, ...]
"""A range of each of the leading axes (..., Hq) of the scores, or (..., H) of keys and values."""


class RowBlock(NamedTuple):
    """Every `step`-th query of a tile from its query `start` on; only a compiled loop knows `start`."""

    start: Array
    length: int
    step: int
    is_new: Array | None = None
    """Which of its rows no block before has, (rows, 1): only these count in sums. None is all."""

    def only_new(self, array: Array) -> Array:
        """Return an array (..., rows, width) of the block, with 0 in the rows of a block before."""
        return array if self.is_new is None else namespace_of(array).where(self.is_new, array, 0.0)

    def slice_rows(self, array: Array) -> Array:
        """Return the block's rows of an array that broadcasts to (..., L, width)."""
        if array.ndim < 2 or array.shape[-2] == 1:
            return array
        loops = library_of(array).loops
        assert loops is not None
        return loops.rows_from(array, self.start, self.length, self.step)


class TokenPositions(NamedTuple):
    """Where tokens stand in their sequences, if not where they stand in the arrays: int32."""

    queries: Array
    """(..., 1, L, 1)."""
    keys: Array
    """(..., 1, 1, S)."""

    def placed_tile(self, tile: Tile) -> Tile:
        return tile._replace(positions=self)


class TilePlace(Protocol):
    """Where the tokens of a call stand for its masks and biases, if not where they stand in its arrays."""

    def placed_tile(self, tile: Tile, /) -> Tile:
        """Return the tile that masks and biases are asked about for a tile of the call."""


class Tile(NamedTuple):
    """Queries `rows` against keys `columns`."""

    rows: range
    columns: range
    grid: ScoreGrid
    leading: LeadingSlice | None = None
    """The batch entries and heads of the tile; None is all of them."""
    block: RowBlock | None = None
    """Which of `rows` are computed now; None is all of them. Masks answer for all of `rows`, so the answer
    holds for any block."""
    origin: tuple[int, ...] | None = None
    """The index (..., Hq, L, S) at which the arrays of masks and biases begin, if they hold one window of the
    grid; None if they hold all of it."""
    placement: WindowBounds | None = None
    """The window of `rows` and `columns` that is computed now, in which `block` counts; None is all of it.
    Masks answer for all of `rows` and `columns`. The arrays of masks and biases hold the window alone."""
    positions: TokenPositions | None = None
    """The positions of the tokens, if they are not the numbers of `rows` and `columns`."""

    def slice(self, array: Array) -> Array:
        """Return the tile's part of an array that broadcasts to (..., Hq, L, S); an axis of 1 stays."""
        if self.placement is not None:
            return array if self.block is None else self.block.slice_rows(array)
        ranges = (*(self.leading or ()), self.rows, self.columns)
        if self.origin is not None:
            ranges = tuple(shifted(r, -first) for r, first in zip(ranges, self.origin, strict=True))
        array = slice_last_axes(array, ranges[-array.ndim :] if array.ndim else ())
        return array if self.block is None else self.block.slice_rows(array)

    def slice_queries(self, array: Array) -> Array:
        """Return the tile's rows of an array (..., L, width), which has the tile's leading axes."""
        # A slice of all would be an operation in a graph.
        if self.placement is None and len(self.rows) != array.shape[-2]:
            array = array[..., self.rows.start : self.rows.stop, :]
        return array if self.block is None else self.block.slice_rows(array)

    def slice_heads(self, array: Array) -> Array:
        """Return the tile's part of an array (Hq, ...)."""
        heads = self.leading[-1] if self.leading else range(self.grid.heads)
        first = 0 if self.origin is None else self.origin[-3]
        return array[heads.start - first : heads.stop - first, ...]

    def slice_integers(self, integers: Integers) -> Integers:
        """Return the integers of the tile's batch entries, with their own least and most."""
        if self.leading is None or isinstance(integers.values, int):
            return integers
        values = self.slice(integers.values)
        # The least and the most of several would have to be computed for each tile.
        bounds = library_of(values).bounds(values) if math.prod(values.shape) == 1 else None
        return integers._replace(values=values) if bounds is None else Integers(bounds[0], *bounds)

    @property
    def shape(self) -> Shape:
        """The shape of the tile's scores, (..., Hq, rows, columns)."""
        leading = self.grid.leading_shape if self.leading is None else tuple(map(len, self.leading))
        (_, rows), (_, columns) = self._known_rows, self._known_columns
        return (*leading, rows, columns)

    @property
    def first_position(self) -> int:
        """The position of the first query among the keys."""
        return self.rows.start + self.grid.position.least

    @property
    def last_position(self) -> int:
        """The position of the last query among the keys."""
        return self.rows.stop - 1 + self.grid.position.most

    @property
    def distances(self) -> tuple[float, float]:
        """The smallest and the largest j - i of the tile's pairs; infinite if they depend on `positions`."""
        if self.positions is not None:
            return -math.inf, math.inf
        return self.columns.start - self.last_position, self.columns.stop - 1 - self.first_position

    @property
    def query_index(self) -> Array:
        """The position of each query among the keys, (rows, 1); with `positions` (..., 1, rows, 1)."""
        if self.positions is not None:
            return self.slice(self.positions.queries)
        values, position, most = self.grid.position
        if position != most:
            return self.row_index + values
        if self.block is None:
            first, count = self._known_rows
            index = self.grid.arange(first + position, first + position + count)
        else:
            index = self.grid.arange(0, self.block.length)
            # Each product and each sum would be an operation of the compiled loop.
            index = index if self.block.step == 1 else index * self.block.step
            first = self.rows.start + position
            index = index + (self.block.start + first if first else self.block.start)
        if self.placement is not None and self.placement.query_start is not None:
            index = index + self.placement.query_start
        return self.grid.in_all_axes(index, 1)

    @property
    def key_index(self) -> Array:
        """The position of each key, (1, columns); with `positions` (..., 1, 1, columns)."""
        if self.positions is not None:
            return self.slice(self.positions.keys)
        first, count = self._known_columns
        index = self.grid.arange(first, first + count)
        if self.placement is not None and self.placement.key_start is not None:
            index = index + self.placement.key_start
        return self.grid.in_all_axes(self.grid.xp.expand_dims(index, axis=0))

    @property
    def _known_rows(self) -> tuple[int, int]:
        """The first of the rows, within the block or from the start of the placement, and their number."""
        if self.block is not None:
            return 0, self.block.length
        return (self.rows.start, len(self.rows)) if self.placement is None else (0, self.placement.queries)

    @property
    def _known_columns(self) -> tuple[int, int]:
        return (self.columns.start, len(self.columns)) if self.placement is None else (0, self.placement.keys)

    @property
    def indices(self) -> tuple[Array, Array, Array, Array]:
        """b, h, i and j as int32 arrays that broadcast to (..., Hq, rows, columns)."""
        of_grid = self._replace(origin=None)
        batch, head = (of_grid.slice(index) for index in (self.grid.batch_index(), self.grid.head_index()))
        return batch, head, *self._real_indices()

    @property
    def row_index(self) -> Array:
        """The number of each query, (rows, 1), whatever its position among the keys."""
        return self._replace(grid=replace(self.grid, position=AT_FIRST_KEY)).query_index

    def _real_indices(self) -> tuple[Array, Array]:
        """Return i and j. Padding has those of the last token, which a function of the caller knows."""
        padding = self.grid.padding
        if padding is None or self.positions is not None:
            return self.query_index, self.key_index
        i, j, xp = self.row_index, self.key_index, self.grid.xp
        i, j = (
            xp.where(index < length, index, length - 1)
            for index, length in ((i, padding.query_lengths), (j, padding.key_lengths))
        )
        return i + padding.positions, j


def shifted(indices: range, by: int) -> range:
    """Return a range that begins and ends `by` later."""
    return range(indices.start + by, indices.stop + by)


def slice_last_axes(array: Array, ranges: tuple[range, ...]) -> Array:
    """Return `ranges` of the last axes of `array`; an axis of 1 stays, since it is broadcast."""
    shape = array.shape[-len(ranges) :]
    index = [slice(r.start, r.stop) if n != 1 else slice(None) for r, n in zip(ranges, shape, strict=True)]
    return array[(..., *index)] if index else array


def slice_leading(array: Array, leading: LeadingSlice) -> Array:
    """Return the part of the axes before the last two; an axis of 1 stays, since it is broadcast."""
    return slice_last_axes(array, (*leading[len(leading) + 2 - array.ndim :], *map(range, array.shape[-2:])))


Allowed: TypeAlias = bool | Array
"""True: every pair of the tile may attend. False: none may. An array: the pairs where it is True."""


def collapse_uniform(tile: Tile, allowed: Array) -> Allowed:
    """Return a bool if `allowed` is the same for every pair.

    The array stays if it is traced, or if a device would have to be waited for.
    """
    xp = tile.grid.xp
    if not tile.grid.may_read(allowed):
        return allowed
    if not bool(xp.any(allowed)):
        return False
    return True if bool(xp.all(allowed)) else allowed


def both(left: Allowed, right: Allowed) -> Allowed:
    """Return the pairs that are in both answers."""
    if left is True or right is False:
        return right
    if right is True or left is False:
        return left
    # In a vmap, MLX 0.32 computes `&` and `|` wrong if one array has fewer axes than the other.
    is_alike = left.ndim == right.ndim
    return left & right if is_alike else namespace_of(left).logical_and(left, right)


def either(left: Allowed, right: Allowed) -> Allowed:
    """Return the pairs that are in one of the answers, or in both."""
    if left is False or right is True:
        return right
    if right is False or left is True:
        return left
    is_alike = left.ndim == right.ndim  # as in `both`
    return left | right if is_alike else namespace_of(left).logical_or(left, right)


def is_masked(scores: Array) -> Array:
    """Return where a score or a bias is -inf; a NaN is not."""
    return scores <= float("-inf")


Axis: TypeAlias = Literal["rows", "columns"] | None


class Target(NamedTuple):
    """An array (..., heads, M, N) that is summed over tiles, as a gradient; an axis of 1 was broadcast."""

    shape: Shape
    axes: tuple[Axis, Axis] = (None, None)
    """Whether M and N are the queries ("rows"), the keys ("columns"), or neither (None)."""
    group: int = 1
    """The number of query heads that share one of its heads."""
    heads_last: bool = False
    """Whether the caller's array is (M, heads)."""
    block: tuple[int, int] = (1, 1)
    """The queries or keys that one row, and one column, is the sum of."""
    dtype: Dtype | None = None
    """None is the accumulation dtype."""

    @property
    def has_own_rows(self) -> bool:
        """Whether no other query adds to the row of a query."""
        return self.axes == ("rows", None) and self.block[0] == 1

    def slices(self, leading: LeadingSlice | None) -> tuple[slice, ...]:
        """Return the index of the part that belongs to a slice of (..., Hq)."""
        lengths = self.shape[:-2]
        if leading is None:
            return (slice(None),) * len(lengths)
        *batch, heads = leading[len(leading) - len(lengths) :]
        ranges = (*batch, range(heads.start // self.group, heads.stop // self.group))
        pairs = zip(ranges, lengths, strict=True)
        return tuple([slice(None) if n == 1 else slice(r.start, r.stop) for r, n in pairs])

    def slice_leading(self, leading: LeadingSlice | None) -> Target:
        """Return the part that belongs to a slice of (..., Hq)."""
        lengths = [len(range(n)[index]) for index, n in zip(self.slices(leading), self.shape, strict=False)]
        return self._replace(shape=(*lengths, *self.shape[-2:]))

    def broadcast_axes(self, leading_shape: Shape) -> list[bool]:
        """Return for each of the axes (..., Hq) whether the array was broadcast along it."""
        missing = len(leading_shape) - len(self.shape[:-2])
        return [n == 1 for n in (*[1] * missing, *self.shape[:-2])]


FactoredSlices: TypeAlias = tuple[Callable[[range], Array], Callable[[range], Array] | None]
"""What `KeyValueSource.factored_slices` returns."""


class KeyValueSource(Protocol):
    """The keys or the values of a call. They are read tile by tile, and all of them are never one copy."""

    __slots__ = ()

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

        What does not depend on the columns is done once. Here each tile is copied or converted.
        """
        xp, dtype = grid.xp, grid.dtype
        if transposed:
            return lambda columns: xp.matrix_transpose(astype_if_needed(xp, self.slice_keys(columns), dtype))
        return lambda columns: astype_if_needed(xp, self.slice_keys(columns), dtype)

    def factored_slices(self, grid: ScoreGrid, *, transposed: bool = False) -> FactoredSlices:
        """Return `slices` without a factor of each key, and a function of `columns` that returns the factors.

        The factors are (..., H, 1, columns); None in place of their function is 1, as here.
        """
        return self.slices(grid, transposed=transposed), None


@dataclass(frozen=True, slots=True, eq=False)
class ArraySource(KeyValueSource):
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
            return KeyValueSource.slices(self, grid, transposed=transposed)
        if not transposed:
            return self.slice_keys
        array = grid.xp.matrix_transpose(self.array)
        whole = range(self.array.shape[-2]) if grid.placement is None else range(FAR)
        # The whole array needs no slice, which would be an operation in a graph.
        return lambda columns: array if columns == whole else array[..., columns.start : columns.stop]
