"""The memory of the tiles of a call, and elementwise operations in it.

The scores of a tile are half a MB. If they were a new array for each tile, the C library would give that memory
back to the system after the tile and ask for it again: in a short call the page faults take as long as the
products. So buffers outlive their call, too: about one MB for each thread, three after calls of packed
sequences, which are stacked there, and up to 6 MB after calls of a paged cache, whose tiles are larger.

A new array for each result would cost more time than an elementwise operation, too. `minus`, `plus`, `times`
and `exp_minus` overwrite their first array, which must belong to the tile, where its arrays lie in buffers. If
the buffers are None, as in a library whose arrays cannot be written to, they return a new array.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from .._libraries.protocols import Array, InPlaceFunctions, Namespace, Shape
from .._tiles.grid import ScoreGrid

MOST_IDLE = 64
"""Sets of buffers that are kept between calls: one for each thread of a large machine."""
_IDLE: dict[Hashable, list[TileBuffers]] = {}
"""Buffers that no call uses, by library, dtype and device."""
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


def _elementwise(
    function: Callable[[Any, Any], Array],
    in_place: Callable[[Any, Any], Array],
    buffers: CallBuffers | None,
    array: Array,
    other: Array,
) -> Array:
    return (in_place if _fits(buffers, array, other) else function)(array, other)


minus = partial(_elementwise, operator.sub, operator.isub)
plus = partial(_elementwise, operator.add, operator.iadd)
times = partial(_elementwise, operator.mul, operator.imul)


def _fits(buffers: CallBuffers | None, array: Array, other: Array) -> bool:
    """Return whether `array` has the shape of the result: values may have a batch that scores do not have."""
    shape, last = other.shape, array.shape[-1]
    return buffers is not None and shape[:-1] == array.shape[:-1] and shape[-1] in (1, last)


def exp_minus(buffers: CallBuffers | None, xp: Namespace, s: Array, shift: Array) -> Array:
    """Return exp(s - shift)."""
    if buffers is None or not _fits(buffers, s, shift):
        return xp.exp(s - shift)
    s -= shift
    return buffers.functions.exp(s, out=s)
