"""Which part of each array belongs to a block of the scores.

A call of many tasks or devices is cut into pieces that no chunk of an array crosses, and each task gets one
block. The bound masks and biases are cut too: the call that all tasks share has slots instead of their arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from .._libraries.protocols import Array, Chunks, Shape
from .._libraries.trees import leaves, with_arrays
from .._programs import BoundOptions

Axis: TypeAlias = int | None
"""An axis of the scores, -1 for S, -2 for L, -3 for Hq, and so on; `KEY_HEADS`; or None for any other axis."""
KEY_HEADS = 1  # no axis of the scores: those are negative
QUERY_AXES: tuple[Axis, ...] = (-3, -2, None)
KEY_AXES: tuple[Axis, ...] = (KEY_HEADS, -1, None)

Place: TypeAlias = tuple[int, ...]
"""The number of a piece on each of the axes (..., Hq, L, S)."""


class Block(NamedTuple):
    """A part of the scores."""

    origin: Shape
    """Its first index on each of the axes (..., Hq, L, S)."""
    shape: Shape

    def __str__(self) -> str:
        *leading, queries, keys = (f"{n}:{n + m}" for n, m in zip(self.origin, self.shape, strict=True))
        *batch, heads = leading
        named = {"batch": ", ".join(batch), "heads": heads, "queries": queries, "keys": keys}
        return ", ".join(f"{name} {part}" for name, part in named.items() if part)


class Pieces(NamedTuple):
    """The pieces of the axes of the scores."""

    ranges: tuple[tuple[range, ...], ...]
    """On each of the axes (..., Hq, L, S)."""
    key_heads: tuple[range, ...]
    key_heads_of: tuple[int, ...]
    """For each piece of the query heads, the number of the piece of key heads that it reads."""

    def block(self, place: Place) -> Block:
        """Return the block at a place; without a number for the keys, the block of no key."""
        ranges = self.ranges_at(place)
        if len(place) < len(self.ranges):
            ranges = (*ranges, range(0))
        return Block(tuple(r.start for r in ranges), tuple(map(len, ranges)))

    def ranges_at(self, place: Place) -> tuple[range, ...]:
        """Return the ranges of a piece on the first of the axes (..., Hq, L, S)."""
        return tuple(ranges[number] for ranges, number in zip(self.ranges, place, strict=False))

    def chunks(self, shape: Shape, axes: Sequence[Axis]) -> Chunks:
        """Return the chunks of an array cut into the pieces; its axes are `axes` of the scores."""
        ranges = (self._ranges_along(axis, length) for axis, length in zip(axes, shape, strict=True))
        return tuple(tuple(map(len, of_axis)) for of_axis in ranges)

    def numbers(self, shape: Shape, axes: Sequence[Axis], place: Place) -> tuple[int, ...]:
        """Return the number of the chunk that belongs to a place, on each axis of an array."""
        return tuple(self._number_along(axis, length, place) for axis, length in zip(axes, shape, strict=True))

    def _ranges_along(self, axis: Axis, length: int) -> tuple[range, ...]:
        """Return the pieces of an axis of an array: one if it is broadcast, or no axis of the scores."""
        if axis is None or length == 1:
            return (range(length),)
        return self.key_heads if axis == KEY_HEADS else self.ranges[axis]

    def _number_along(self, axis: Axis, length: int, place: Place) -> int:
        if axis is None or length == 1:
            return 0
        return self.key_heads_of[place[-3]] if axis == KEY_HEADS else place[axis]


class AlignedArray(NamedTuple):
    """An array whose axes lie along axes of the scores."""

    array: Array
    axes: tuple[Axis, ...]


def aligned_axes(axes: Sequence[Axis], ndim: int) -> tuple[Axis, ...]:
    """Return `axes`, the last ones of an array with `ndim` axes, with the batch axes before them."""
    return (*range(-ndim, -len(axes)), *axes)[-ndim:] if ndim else ()


def cut(scores_shape: Shape, query: Chunks, key: Chunks, value: Chunks) -> Pieces:
    """Cut the scores, (..., Hq, L, S), where query, key or value, (..., heads, length, width), are cut."""
    *batch, heads, queries, keys = scores_shape
    ranges = []
    for axis, length in zip(range(-3 - len(batch), -3), batch, strict=True):
        cuts = [chunks[axis] for chunks in (query, key, value) if len(chunks) >= -axis]
        # An axis that is broadcast, of length 1, cuts nothing.
        ranges.append(_ranges({0, length}.union(*(_borders(c) for c in cuts if sum(c) == length))))
    group = heads // sum(key[-3])
    # A task reads its key heads as one chunk: each piece of query heads belongs to one piece of key heads.
    of_heads = _head_ranges(_borders(query[-3]), _borders(key[-3]) | _borders(value[-3]), group)
    read = [range(r.start // group, -(-r.stop // group)) for r in of_heads]
    key_heads = tuple(sorted(set(read), key=lambda r: r.start))
    ranges += [
        of_heads,
        _ranges({0, queries} | _borders(query[-2])),
        _ranges({0, keys} | _borders(key[-2]) | _borders(value[-2])),
    ]
    return Pieces(tuple(ranges), key_heads, tuple(map(key_heads.index, read)))


def _head_ranges(query: set[int], key: set[int], group: int) -> tuple[range, ...]:
    """Cut query heads so that a piece has whole groups, or lies within one group."""
    cuts = query | {group * head for head in key}
    for piece in _ranges(cuts):
        if piece.start // group != (piece.stop - 1) // group:
            cuts |= {-(-piece.start // group) * group, piece.stop // group * group}
    return _ranges(cuts)


def _borders(chunks: Sequence[int]) -> set[int]:
    """Return where chunks begin and end."""
    return {0, *itertools.accumulate(chunks)}


def _ranges(cuts: set[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in itertools.pairwise(sorted(cuts)))


class Slot:
    """What stands for each array in bound options: the class itself, which is pickled by its name."""


def take_arrays(bound: BoundOptions) -> tuple[BoundOptions, list[AlignedArray]]:
    """Return the options with a slot for each array, and the arrays in the order of the slots."""
    arrays = []
    for array, _, holder, argument in leaves(bound):
        axes: tuple[Axis, ...] | None = getattr(holder, "array_axes", {}).get(argument)
        # Others broadcast to the scores.
        arrays.append(AlignedArray(array, aligned_axes((), array.ndim) if axes is None else axes))
    return with_arrays(bound, lambda _: Slot), arrays


def put_blocks(bound: BoundOptions, blocks: Sequence[Array]) -> BoundOptions:
    """Return the options with a block in each slot."""
    remaining = iter(blocks)
    return with_arrays(bound, lambda _: next(remaining), lambda part: part is Slot)
