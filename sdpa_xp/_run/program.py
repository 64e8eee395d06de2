"""A program: the tiles that it reads, what it computes of them, and the results in which it puts that.

A program has targets, and says what a range of queries adds to each. It does not know who runs it, and an
executor does not know what it computes.

A result is an array that can be written to, or pieces of one. It is an array of its own: no other result, and
nothing else, has its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol, Self, TypeAlias

from .._libraries import astype_if_needed
from .._libraries.protocols import Array, Dtype, Namespace, Shape
from .._tiles import LeadingSlice, RowBlock, Target, Tile
from .._tiles.grid import ScoreGrid
from .._tiles.plan import Plan
from .buffers import CallBuffers


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


class TiledScores(Protocol):
    """The scores of a program, as an executor knows them."""

    @property
    def grid(self) -> ScoreGrid: ...
    @property
    def query(self) -> Array: ...
    @property
    def may_be_kept(self) -> bool:
        """Whether a function may keep the scores of a tile."""

    def tile(self, rows: range, columns: range) -> Tile: ...
    def key_range(self, rows: range) -> range:
        """Return the keys that some queries may attend, in one piece."""

    def slice_leading(self, leading: LeadingSlice) -> Self:
        """Return the scores of some batch entries and heads."""

    def in_block(self, block: RowBlock) -> Self:
        """Return the scores of an iteration of a loop."""

    def in_memory(self, buffers: CallBuffers | None, *, shares_tiles: bool) -> Self:
        """Return the scores of many tiles, in buffers if there are some."""


@dataclass(frozen=True, slots=True)
class Program:
    """What is computed from the tiles of a call."""

    scores: TiledScores
    plan: Plan
    targets: Mapping[str, Target]
    """The arrays that are computed, by name."""
    shares_tiles: ClassVar[bool] = True
    """Whether the answers of a mask are kept for the heads of a range of queries, which takes memory."""

    @property
    def grid(self) -> ScoreGrid:
        return self.scores.grid

    @property
    def keeps_scores(self) -> bool:
        """Whether the scores of a tile are needed after the next one is computed: then no buffer holds them."""
        return self.scores.may_be_kept

    @property
    def is_recomputed(self) -> bool:
        """Whether a library that records it computes each range again for its gradients, to keep less.

        Functions of the caller may read arrays that need gradients, too; so all that is recorded is asked.
        """
        return False

    def add_rows(self, results: Results, rows: range) -> None:
        """Add what a range of queries contributes, or set its rows."""
        raise NotImplementedError

    def slice_leading(self, leading: LeadingSlice) -> Self:
        """Return the program of some batch entries and heads, with the same targets."""
        return replace(self, scores=self.scores.slice_leading(leading))


@dataclass(frozen=True, slots=True)
class Repairable(Program):
    """A program that is computed without a guard first, since a guard takes more products."""

    def guarded(self) -> Self:
        """Return the program with a guard, which is right whatever its inputs hold."""
        raise NotImplementedError

    def trusted(self, *, reads_ranges: bool) -> Self | None:
        """Return the program whose results need no look; None if a look at all of them tells what is wrong.

        With `reads_ranges` it may look at each of its ranges itself.
        """
        raise NotImplementedError

    def with_checksum(self) -> Self:
        """Return the program with what `repaired` looks at."""
        return self

    def repaired(self, results: dict[str, Array]) -> Program | None:
        """Return the program that computes wrong `results` of `with_checksum` again; None if all are right."""
        raise NotImplementedError


def in_pieces(program: Program, rows: Sequence[range], columns: Sequence[range]) -> dict[str, JoinedResult]:
    """Return results in pieces for the targets of a program."""
    grid = program.grid
    return {name: JoinedResult(target, grid, rows, columns) for name, target in program.targets.items()}


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
