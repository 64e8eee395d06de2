"""What a grid knows of a device: numbers that masks ask it for, lists that lie there, and padded lengths.

All numbers are read at once, so that a call waits for the device once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from .._checks.score_arrays import Integers
from .._libraries import astype_if_needed, dtype_name
from .._libraries.base import Library
from .._libraries.protocols import Array, Device, Dtype, Namespace

MOST_PLACED = 64
"""The lists of numbers whose copies on a device are kept."""
_PLACED: dict[Hashable, Array] = {}
"""Copies of lists by library, device, stream, dtype and numbers. Calls and threads share them, since nothing
writes to them. If two threads copy a list at the same time, one copy is kept."""
SIDE = 256
"""The rows and the columns of a block: a tile of a device has no more rows, and mostly more columns."""


class Questions:
    """What masks and biases ask while they are bound.

    They are bound twice: the first time their questions are noted, and the second time they are answered.
    """

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._answers: Iterator[list[int]] | None = None

    def ask(self, integers: Callable[[], Array]) -> list[int] | None:
        """Return the elements of an array of integers or booleans; None if they are not known yet."""
        if self._answers is not None:
            return next(self._answers)
        self.arrays.append(integers())
        return None

    def read(self, library: Library, xp: Namespace) -> list[list[int]]:
        """Wait for the device, and return the answers to all questions."""
        # One array is one copy. It is int64 only if ids are, since a device may lack that.
        dtype = next((x.dtype for x in self.arrays if dtype_name(x.dtype) == "int64"), xp.int32)
        flat = [xp.reshape(astype_if_needed(xp, array, dtype), (-1,)) for array in self.arrays]
        numbers = iter(library.to_list(xp.concat(flat, axis=0)))
        answers = [[next(numbers) for _ in range(array.shape[0])] for array in flat]
        self._answers = iter(answers)
        return answers


class BlockBounds(NamedTuple):
    """The least and the most element in each block of `SIDE` rows and columns of an array; True counts as 1."""

    least: Sequence[Sequence[int]]
    most: Sequence[Sequence[int]]

    def within(self, rows: range, columns: range) -> tuple[int, int]:
        """Return bounds of the elements in `rows` and `columns`; an axis of one block may be broadcast."""
        least = [min(line[_blocks(columns, line)]) for line in self.least[_blocks(rows, self.least)]]
        most = [max(line[_blocks(columns, line)]) for line in self.most[_blocks(rows, self.most)]]
        return min(least), max(most)


def ask_block_bounds(questions: Questions, xp: Namespace, array: Array) -> BlockBounds | None:
    """Return the bounds of (..., rows, columns) over all leading axes; None if they are not known yet."""
    answer = questions.ask(lambda: _block_bounds(xp, array))
    if answer is None:
        return None
    columns = -(-array.shape[-1] // SIDE)
    lines = [answer[first : first + columns] for first in range(0, len(answer), columns)]
    return BlockBounds(lines[: len(lines) // 2], lines[len(lines) // 2 :])


def put_once(
    library: Library,
    xp: Namespace,
    device: Device,
    dtype: Dtype,
    numbers: Sequence[float],
    sharing: tuple[object, AbstractContextManager[object]],
) -> Array:
    """Return a list of numbers as an array, which calls share as `sharing` of the library says."""
    sharing_key, lasting = sharing
    key = library, str(device), sharing_key, dtype, tuple(numbers)  # CuPy's devices have no hash
    placed = _PLACED.get(key)
    if placed is None:
        with lasting:
            placed = xp.asarray(numbers, dtype=dtype, device=device)
        if len(_PLACED) >= MOST_PLACED:
            _PLACED.clear()
        _PLACED[key] = placed
    return placed


def bounds_of_list(numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the least and the most number in each `SIDE` of them."""
    parts = [numbers[first : first + SIDE] for first in range(0, len(numbers), SIDE)]
    return [min(part) for part in parts], [max(part) for part in parts]


def _block_bounds(xp: Namespace, array: Array) -> Array:
    """Return the least elements of all blocks, and then the most elements."""
    for axis in (-2, -1):
        array = _fill_last_block(xp, array, axis)
    sides = [min(SIDE, length) for length in array.shape[-2:]]
    rows, columns = (length // side for length, side in zip(array.shape[-2:], sides, strict=True))
    blocks = xp.reshape(array, (-1, rows, sides[0], columns, sides[1]))
    least, most = (xp.all, xp.any) if dtype_name(array.dtype) == "bool" else (xp.min, xp.max)
    return xp.stack([least(blocks, axis=(0, 2, 4)), most(blocks, axis=(0, 2, 4))], axis=0)


def _fill_last_block(xp: Namespace, array: Array, axis: int) -> Array:
    """Return an array whose last block is full: its last elements are repeated, which changes no bound."""
    length = array.shape[axis]
    missing = -length % SIDE if length > SIDE else 0
    if not missing:
        return array
    last = array[..., -1:, :] if axis == -2 else array[..., -1:]
    shape = [*array.shape]
    shape[axis] = missing
    return xp.concat([array, xp.broadcast_to(last, tuple(shape))], axis=axis)


def _blocks(indices: range, line: Sequence[object]) -> slice:
    """Return the blocks that `indices` lie in."""
    return slice(None) if len(line) == 1 else slice(indices.start // SIDE, -(-indices.stop // SIDE))


class PaddedLengths(NamedTuple):
    """The lengths of the batch entries of a grid that are padded to the lengths of the grid."""

    queries: tuple[int, ...]
    """L of each entry."""
    keys: tuple[int, ...]
    """S of each entry."""
    first_positions: tuple[int, ...]
    """The position of the first query of each entry among its keys."""
    query_lengths: Array
    """The same on the device, int32 (n, 1, 1, 1)."""
    key_lengths: Array
    positions: Array

    def lengths(self, letter: str) -> tuple[int, ...]:
        """Return L or S of each entry."""
        return self.queries if letter == "L" else self.keys

    def lower_right(self) -> Integers:
        """Return the shift that puts the last query of each entry at its last key."""
        numbers = zip(self.keys, self.queries, self.first_positions, strict=True)
        shifts = [keys - queries - position for keys, queries, position in numbers]
        if len({*shifts}) == 1:
            return Integers(*[shifts[0]] * 3)
        return Integers(self.key_lengths - self.query_lengths - self.positions, min(shifts), max(shifts))

    def real_keys(self) -> Integers:
        """Return the number of keys of each entry."""
        return Integers(self.key_lengths, min(self.keys), max(self.keys))
