"""Where programs put what they compute: into an array that can be written to, or into pieces of one.

A result is an array of its own: no other result, and nothing else, has its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from .._libraries import astype_if_needed
from .._libraries.protocols import Array, Dtype, Namespace, Shape
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import Target, Tile


class Result(Protocol):
    """What is computed of one target, or of its part of some batch entries and heads."""

    def add(self, tile: Tile, contribution: Array) -> None:
        """Add the contribution of a tile, summed over the axes along which the target is broadcast."""

    def put(self, rows: range, array: Array) -> None:
        """Set the rows of some queries, of a target that `has_own_rows`."""

    def memory(self, rows: range) -> Array | None:
        """Return where the rows of some queries belong, zeros; None if they cannot be added to there."""


Results: TypeAlias = Mapping[str, Result]


class WrittenResult(NamedTuple):
    """A result in an array."""

    target: Target
    grid: ScoreGrid
    array: Array

    def add(self, tile: Tile, contribution: Array) -> None:
        ranges = {"rows": tile.rows, "columns": tile.columns}
        index = [
            slice(ranges[axis].start // size, -(-ranges[axis].stop // size)) if axis else slice(None)
            for axis, size in zip(self.target.axes, self.target.block, strict=True)
        ]
        part = self.array[(..., *index)]  # a view, which `self.array[...] += x` would copy onto itself
        part += _of_target(self.target, self.grid.xp, contribution)

    def put(self, rows: range, array: Array) -> None:
        self.array[..., rows.start : rows.stop, :] = astype_if_needed(self.grid.xp, array, self.array.dtype)

    def memory(self, rows: range) -> Array | None:
        # A half cannot hold the sums: it is rounded once, at the end.
        is_wide = self.array.dtype == self.grid.dtype
        return self.array[..., rows.start : rows.stop, :] if is_wide else None


class JoinedResult:
    """A result in pieces, by the queries of `rows` and the keys of `columns`, which are joined at the end."""

    def __init__(
        self, target: Target, grid: ScoreGrid, rows: Sequence[range], columns: Sequence[range]
    ) -> None:
        self.target, self.grid = target, grid
        self.pieces: dict[tuple[int, int], Array] = {}  # not dict[...](), which not every compiler traces
        """By the first row and the first column of each piece."""
        # One piece of an axis that is neither, whose length may be a symbol.
        self.ranges = [{"rows": rows, "columns": columns, None: [range(0)]}[axis] for axis in target.axes]

    def add(self, tile: Tile, contribution: Array) -> None:
        starts = {"rows": tile.rows.start, "columns": tile.columns.start, None: 0}
        place = starts[self.target.axes[0]], starts[self.target.axes[1]]
        piece = _of_target(self.target, self.grid.xp, contribution)
        self.pieces[place] = self.pieces[place] + piece if place in self.pieces else piece

    def put(self, rows: range, array: Array) -> None:
        self.pieces[rows.start, 0] = astype_if_needed(self.grid.xp, array, self._dtype)

    def memory(self, _rows: range) -> None:
        return None

    def joined(self) -> Array:
        """Return the result, (..., heads, M, N); 0 where no tile has contributed."""
        row_ranges, column_ranges = self.ranges
        rows = [_concat(self.grid.xp, [self._piece(m, n) for n in column_ranges], -1) for m in row_ranges]
        return _concat(self.grid.xp, rows, -2)

    @property
    def _dtype(self) -> Dtype:
        return self.target.dtype or self.grid.dtype

    def _piece(self, m: range, n: range) -> Array:
        piece = self.pieces.get((m.start, n.start))
        if piece is not None:
            return piece
        shape = self.target.shape
        if self.grid.placement is None:  # if a length is a symbol there is one piece, whose ranges hold more
            lengths = zip(self.target.axes, (m, n), shape[-2:], strict=True)
            shape = (*shape[:-2], *(len(part) if axis else whole for axis, part, whole in lengths))
        return self.grid.xp.zeros(shape, dtype=self._dtype, device=self.grid.device)


def joined(results: Mapping[str, JoinedResult]) -> dict[str, Array]:
    """Return the arrays of results."""
    arrays: dict[str, Array] = {}
    for name, result in results.items():
        array = result.joined()
        # The same contribution may be all of two results, as the gradients of two biases of one shape.
        if any(array is other for other in arrays.values()):
            array = result.grid.xp.astype(array, array.dtype, copy=True)
        arrays[name] = array
    return arrays


def _of_target(target: Target, xp: Namespace, contribution: Array) -> Array:
    """Return the contribution of a tile in the shape that it has in the target."""
    lengths = zip(target.axes, contribution.shape[-2:], target.shape[-2:], strict=True)
    shape = (*target.shape[:-2], *(of_tile if axis else whole for axis, of_tile, whole in lengths))
    return sum_to_shape(xp, contribution, shape)


def sum_to_shape(xp: Namespace, array: Array, shape: Shape) -> Array:
    """Sum `array` over the axes along which an array of `shape` was broadcast to it."""
    while array.ndim > len(shape):
        array = xp.sum(array, axis=0)
    for axis, n in enumerate(shape):
        if n == 1 != array.shape[axis]:
            array = xp.sum(array, axis=axis, keepdims=True)
    return array


def between_zeros(grid: ScoreGrid, array: Array, axis: int, before: int, behind: int) -> Array:
    """Return an array with zeros before and behind its own elements along `axis`."""
    device = None if grid.access.is_traced else grid.device  # an array of a trace may be on no single device

    def zeros(count: int) -> Array:
        shape = [*array.shape]
        shape[axis] = count
        return grid.xp.zeros((*shape,), dtype=array.dtype, device=device)

    return grid.xp.concat([zeros(before), array, zeros(behind)], axis=axis) if before or behind else array


def _concat(xp: Namespace, pieces: Sequence[Array], axis: int) -> Array:
    return pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=axis)  # `concat` of one would copy it
