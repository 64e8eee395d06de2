"""The sums over tiles of one array.

Where arrays can be written to, each tile adds to its part of one. Elsewhere it adds to a piece, and pieces are
joined at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._libraries.protocols import Array, Device, Namespace, Shape
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import Target, Tile


class Accumulator:
    """The sum of one target, for the queries of `rows` and the keys of `columns`."""

    def __init__(
        self,
        target: Target,
        rows: Iterable[range],
        columns: Iterable[range],
        grid: ScoreGrid,
        out: Array | None = None,
    ) -> None:
        self.target, self.grid, self.out = target, grid, out
        self.pieces: dict[tuple[int, int], Array] = {}  # not dict[...](), which not every compiler traces
        """By the first row and the first column of each piece."""
        cuts = {"rows": [*rows], "columns": [*columns]}
        self.ranges = [
            cuts[axis] if axis else [range(length)]
            for axis, length in zip(target.axes, target.shape[-2:], strict=True)
        ]

    def add(self, tile: Tile, gradient: Array) -> None:
        """Add the contribution of a tile, summed over the axes that were broadcast."""
        lengths = zip(self.target.axes, gradient.shape[-2:], self.target.shape[-2:], strict=True)
        shape = (*self.target.shape[:-2], *(of_tile if axis else whole for axis, of_tile, whole in lengths))
        summed = sum_to_shape(self.grid.xp, gradient, shape)
        ranges = {"rows": tile.rows, "columns": tile.columns}
        if self.out is not None:
            index = [
                slice(ranges[axis].start // size, -(-ranges[axis].stop // size)) if axis else slice(None)
                for axis, size in zip(self.target.axes, self.target.block, strict=True)
            ]
            part = self.out[(..., *index)]  # a view, which `self.out[...] += summed` would copy onto itself
            part += summed
            return
        first, second = (ranges[axis].start if axis else 0 for axis in self.target.axes)
        place = first, second
        self.pieces[place] = self.pieces[place] + summed if place in self.pieces else summed

    def array(self) -> Array:
        """Return the gradient, (..., heads, M, N); 0 where no tile has contributed."""
        xp = self.grid.xp
        row_ranges, column_ranges = self.ranges
        rows = [_concat(xp, [self._piece(m, n) for n in column_ranges], -1) for m in row_ranges]
        return _concat(xp, rows, -2)

    def _piece(self, m: range, n: range) -> Array:
        piece = self.pieces.get((m.start, n.start))
        if piece is not None:
            return piece
        # If a length is a symbol there is one piece, whose ranges hold more.
        shape = (*self.target.shape[:-2], len(m), len(n)) if self.grid.placement is None else self.target.shape
        return self.grid.xp.zeros(shape, dtype=self.grid.dtype, device=self.grid.device)


def sum_to_shape(xp: Namespace, array: Array, shape: Shape) -> Array:
    """Sum `array` over the axes along which an array of `shape` was broadcast to it."""
    while array.ndim > len(shape):
        array = xp.sum(array, axis=0)
    for axis, n in enumerate(shape):
        if n == 1 != array.shape[axis]:
            array = xp.sum(array, axis=axis, keepdims=True)
    return array


def between_zeros(
    xp: Namespace, array: Array, axis: int, before: int, behind: int, device: Device | None = None
) -> Array:
    """Return an array with zeros before and behind its own elements along `axis`.

    Without a device it is an array of a trace, which is on no single device.
    """

    def zeros(count: int) -> Array:
        shape = [*array.shape]
        shape[axis] = count
        return xp.zeros((*shape,), dtype=array.dtype, device=device)

    return xp.concat([zeros(before), array, zeros(behind)], axis=axis) if before or behind else array


def _concat(xp: Namespace, pieces: Sequence[Array], axis: int) -> Array:
    return pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=axis)  # `concat` of one would copy it
