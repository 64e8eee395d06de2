"""Which arrays of a call have gradients, whether all are known, and their sums over tiles.

Where arrays can be written to, each tile adds to its part of one. Elsewhere it adds to a piece, and pieces are
joined at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._libraries.protocols import Array, Namespace, Shape
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import GradientTarget, Tile
from .scores import Scores

PROBE_SIDE = 8
"""Queries and keys of the tile on which a function of the caller is tried before a call is computed."""


def gradient_targets(
    scores: Scores, key: Array, value: Array, names: Iterable[str]
) -> tuple[dict[str, GradientTarget], tuple[str | None, ...]]:
    """Return the arrays whose gradients are computed, by name, and the name of the array of each bias.

    `names` are those of the floating arrays, in the order of the biases that hold them.
    """
    targets = {
        "query": GradientTarget(scores.query.shape, ("rows", None)),
        "key": GradientTarget(key.shape, ("columns", None), scores.group),
        "value": GradientTarget(value.shape, ("columns", None), scores.group),
    }
    of_biases = [name for name in names if name not in (*targets, "scale", "sinks")]
    bias_names = tuple(
        # Only a floating array is a target, and the names have the order of the biases.
        None if bias.gradient_target is None else of_biases.pop(0)
        for bias in scores.options.biases
    )
    for name, bias in zip(bias_names, scores.options.biases, strict=True):
        if name and bias.gradient_target:
            targets[name] = bias.gradient_target
    if not isinstance(scores.options.scale, float):
        shape = (*[1] * (3 - scores.options.scale.ndim), *scores.options.scale.shape)
        targets["scale"] = GradientTarget(shape, ("rows" if shape[-2] > 1 else None, None))
    if scores.options.sinks is not None:
        targets["sinks"] = GradientTarget((*[1] * (3 - scores.options.sinks.ndim), *scores.options.sinks.shape))
    return targets, bias_names


def try_functions(scores: Scores) -> None:
    """Refuse a bias whose function does more than add: it is tried on some scores before the call."""
    if not scores.options.has_functions:
        return
    grid = scores.grid
    rows, columns = (range(min(PROBE_SIDE, len(side))) for side in grid.sides)
    tile = scores.tile(rows, columns)
    distance = grid.xp.astype(tile.key_index - tile.query_index, grid.dtype)
    # None of these scores is 0, of which a multiple is no other number.
    probe = grid.xp.broadcast_to(distance * 0.75 + 0.5, tile.shape)
    for bias in scores.options.biases:
        if bias.is_of_caller:
            bias.gradient(tile, probe, probe)


class GradientAccumulator:
    """The gradient of one array, for the queries of `rows` and the keys of `columns`."""

    def __init__(
        self,
        target: GradientTarget,
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
            index = [slice(ranges[x].start, ranges[x].stop) if x else slice(None) for x in self.target.axes]
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


def between_zeros(xp: Namespace, array: Array, axis: int, before: int, behind: int) -> Array:
    """Return an array of a trace with zeros before and behind its own elements along `axis`."""

    def zeros(count: int) -> Array:
        shape = [*array.shape]
        shape[axis] = count
        return xp.zeros((*shape,), dtype=array.dtype, device=None)  # no array of a trace is on one device

    return xp.concat([zeros(before), array, zeros(behind)], axis=axis) if before or behind else array


def _concat(xp: Namespace, pieces: Sequence[Array], axis: int) -> Array:
    return pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=axis)  # `concat` of one would copy it
