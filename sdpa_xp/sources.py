"""Where the keys, or the values, of a tile come from, and how their axes are ordered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from sdpa_xp import checks
from sdpa_xp._libraries.protocols import Array, Namespace
from sdpa_xp.tiles import Part, cut_leading

Layout: TypeAlias = Literal["...HLE", "...LHE"]
"""Where the heads stand: before the length, or behind it."""


class Source(Protocol):
    """The keys or values of a call; they are cut, never made into one array."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    def of(self, part: Part) -> Source:
        """Those of a part, given by ranges of (..., H)."""

    def cut(self, columns: range) -> Array:
        """(..., H, columns, width)."""


class Whole(NamedTuple):
    """One array, (..., H, S, width)."""

    array: Array

    @property
    def width(self) -> int:
        return self.array.shape[-1]

    @property
    def heads(self) -> int:
        return self.array.shape[-3]

    def of(self, part: Part) -> Whole:
        return Whole(cut_leading(self.array, part))

    def cut(self, columns: range) -> Array:
        whole = len(columns) == self.array.shape[-2]
        return self.array if whole else self.array[..., columns.start : columns.stop, :]


class Blocks(NamedTuple):
    """Blocks of a pool (blocks, H, size, width), in the order of `table`; a tile lies within one block."""

    pool: Array
    table: Sequence[int]

    @property
    def width(self) -> int:
        return self.pool.shape[-1]

    @property
    def heads(self) -> int:
        return self.pool.shape[-3]

    def of(self, part: Part) -> Blocks:
        return Blocks(cut_leading(self.pool, part), self.table)

    def cut(self, columns: range) -> Array:
        size = self.pool.shape[-2]
        number, start = divmod(columns.start, size)
        return self.pool[self.table[number], :, start : start + len(columns), :]


def at(axis: int, start: int, stop: int) -> tuple[Any, ...]:
    """The index of `start` to `stop` on one axis, counted from the last."""
    return (..., slice(start, stop), *[slice(None)] * (-1 - axis))


def swapped(xp: Namespace, array: Array, layout: str) -> Array:
    """(..., L, H, E) <-> (..., H, L, E) where `layout` has the heads behind the length: a view."""
    if layout == checks.HLE or array.ndim < 3:
        return array
    *batch, one, other, width = range(array.ndim)
    return xp.permute_dims(array, (*batch, other, one, width))
