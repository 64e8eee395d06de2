"""Blocks of queries with a list of keys each, in place of ranges of keys."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from .._libraries import library_of, namespace_of
from .._libraries.protocols import Array, Shape
from . import Allowed, both
from .grid import ScoreGrid


class KeyLists(NamedTuple):
    """The tokens of each block, int32."""

    queries: Array
    """(blocks, n). A query may stand in two blocks, which give it the same output."""
    keys: Array
    """(lists * blocks, k): once each key that a query of the block attends to, and others; or, with a `size`,
    the numbers of blocks of keys."""
    places: Array
    """(L,): where each query of the call stands among `queries`."""
    is_real: Array | None = None
    """Which of `keys` are no padding; None is all of them."""
    shape: Shape = ()
    """The lengths of the axes (..., h) of batch entries and heads with lists of their own."""
    size: int = 1
    most: int = 0
    """The number of all keys, if there is a `size`."""

    def tokens(self, rows: slice) -> tuple[Array, Allowed]:
        """Return the tokens of some rows of `keys`, (rows, m), and which of them are no padding."""
        numbers, size = self.keys[rows, :], self.size
        is_real: Allowed = True if self.is_real is None else self.is_real[rows, :]
        if size == 1:
            return numbers, is_real
        xp, shape = namespace_of(numbers), (numbers.shape[0], numbers.shape[1] * size)
        within = xp.arange(0, size, dtype=xp.int32, device=library_of(numbers).device(numbers))
        tokens = xp.reshape(xp.expand_dims(numbers, axis=-1) * size + within, shape)
        if not isinstance(is_real, bool):
            whole = xp.broadcast_to(xp.expand_dims(is_real, axis=-1), (*numbers.shape, size))
            is_real = xp.reshape(whole, shape)
        if self.most % size:  # the last block is shorter
            is_real = both(is_real, tokens < self.most)
            tokens = xp.where(tokens < self.most, tokens, self.most - 1)
        return tokens, is_real


class Patches(Protocol):
    """How a mask cuts the queries of a call into blocks, if its ranges of keys would hold many masked ones."""

    @property
    def others(self) -> Any:
        """The pattern that the pairs of a block have to be in."""

    @property
    def blocks(self) -> int: ...
    @property
    def queries(self) -> int:
        """The queries of a block."""

    @property
    def keys(self) -> int:
        """The keys of a block."""

    def group(self, group: int, /) -> int:
        """Return the number of query heads that share the keys of a block, of the `group` of a key head."""

    def key_lists(self, grid: ScoreGrid, /) -> KeyLists: ...
