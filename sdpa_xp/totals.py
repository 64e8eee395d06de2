"""Gradients as sums over tiles: each tile adds to a piece, and the pieces are joined at the end.

No array is written to in place, since not every library can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from sdpa_xp._libraries.protocols import Array, Namespace, Shape
from sdpa_xp.pairs import Pairs
from sdpa_xp.tiles import Part, Plan, Tile

Axis: TypeAlias = Literal["rows", "columns"] | None


class Learned(NamedTuple):
    """An array whose gradient is asked for, seen as (..., heads, M, N); an axis of 1 was broadcast."""

    shape: Shape
    along: tuple[Axis, Axis] = (None, None)
    """Whether M and N are cut as the queries are, or as the keys; None is neither."""
    group: int = 1
    """Query heads that share one of its heads."""
    heads_last: bool = False
    """Whether the caller gave it as (M, heads)."""

    def slices(self, part: Part | None) -> tuple[slice, ...]:
        """Which of it belongs to a part of (..., Hq)."""
        leading = self.shape[:-2]
        if part is None:
            return (slice(None),) * len(leading)
        *batch, heads = part[len(part) - len(leading) :]
        ranges = (*batch, range(heads.start // self.group, heads.stop // self.group))
        return tuple(
            slice(None) if n == 1 else slice(own.start, own.stop)
            for own, n in zip(ranges, leading, strict=True)
        )

    def of(self, part: Part | None) -> Learned:
        """Its part."""
        leading = [len(range(n)[own]) for own, n in zip(self.slices(part), self.shape, strict=False)]
        return self._replace(shape=(*leading, *self.shape[-2:]))

    def as_given(self, xp: Namespace, gradient: Array, shape: Shape) -> Array:
        """The gradient in the shape in which the array was given."""
        return xp.reshape(xp.permute_dims(gradient, (2, 1, 0)) if self.heads_last else gradient, shape)

    def repeats(self, leading: Shape) -> list[bool]:
        """Along which of the axes (..., Hq) it was broadcast."""
        own = self.shape[:-2]
        return [n == 1 for n in (*[1] * (len(leading) - len(own)), *own)]


class Total:
    """The gradient of one array."""

    def __init__(self, learned: Learned, plan: Plan, pairs: Pairs) -> None:
        self.learned, self.pairs, self.pieces = learned, pairs, dict[tuple[int, int], Array]()
        whole = [[range(n)] for n in learned.shape[-2:]]
        cuts = {"rows": [*plan.row_ranges()], "columns": [*plan.column_ranges(range(plan.keys))]}
        self.grid = [cuts[axis] if axis else own for axis, own in zip(learned.along, whole, strict=True)]

    def add(self, tile: Tile, gradient: Array) -> None:
        """Add what a tile contributes; it is summed over the axes that were broadcast."""
        starts = {"rows": tile.rows.start, "columns": tile.columns.start, None: 0}
        at = starts[self.learned.along[0]], starts[self.learned.along[1]]
        ends = zip(self.learned.along, gradient.shape[-2:], self.learned.shape[-2:], strict=True)
        shape = (*self.learned.shape[:-2], *(here if axis else whole for axis, here, whole in ends))
        own = summed(self.pairs.xp, gradient, shape)
        self.pieces[at] = self.pieces[at] + own if at in self.pieces else own

    def array(self) -> Array:
        """All of it, (..., heads, M, N); 0 where no tile had a part in it."""
        xp = self.pairs.xp
        rows = [joined(xp, [self._piece(m, n) for n in self.grid[1]], -1) for m in self.grid[0]]
        return joined(xp, rows, -2)

    def _piece(self, m: range, n: range) -> Array:
        found = self.pieces.get((m.start, n.start))
        shape = (*self.learned.shape[:-2], len(m), len(n))
        dtype, device = self.pairs.dtype, self.pairs.device
        return self.pairs.xp.zeros(shape, dtype=dtype, device=device) if found is None else found


def summed(xp: Namespace, array: Array, shape: Shape) -> Array:
    """`array` summed to `shape`, along the axes that this was broadcast along."""
    while array.ndim > len(shape):
        array = xp.sum(array, axis=0)
    for axis, n in enumerate(shape):
        if n == 1 != array.shape[axis]:
            array = xp.sum(array, axis=axis, keepdims=True)
    return array


def joined(xp: Namespace, pieces: Sequence[Array], axis: int) -> Array:
    """The pieces one after the other."""
    return pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=axis)
