"""Where the keys, or the values, of a tile come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sdpa_xp.protocols import Array


class Source(Protocol):
    """The keys or values of a call; they are cut, never made into one array."""

    @property
    def heads(self) -> int: ...
    @property
    def width(self) -> int: ...
    def cut(self, columns: range) -> Array:
        """(..., H, columns, width)."""


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """One array, (..., H, S, width)."""

    array: Array

    @property
    def heads(self) -> int:
        return self.array.shape[-3]

    @property
    def width(self) -> int:
        return self.array.shape[-1]

    def cut(self, columns: range) -> Array:
        return self.array[..., columns.start : columns.stop, :]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of a pool (blocks, H, size, width), in the order of `table`; a tile lies within one block."""

    pool: Array
    table: Sequence[int]

    @property
    def heads(self) -> int:
        return self.pool.shape[-3]

    @property
    def width(self) -> int:
        return self.pool.shape[-1]

    def cut(self, columns: range) -> Array:
        size = self.pool.shape[-2]
        number, start = divmod(columns.start, size)
        return self.pool[self.table[number], :, start : start + len(columns), :]


def at(axis: int, start: int, stop: int) -> tuple[Any, ...]:
    """The index of `start` to `stop` on one axis, counted from the last."""
    return (..., slice(start, stop), *[slice(None)] * (-1 - axis))
