"""Patches of an image or of a volume: tokens that lie together, and the tokens around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._libraries.protocols import Array, Namespace
from .._tiles.grid import ScoreGrid
from .._tiles.key_lists import KeyLists
from .._tiles.tuning import PatchSize
from .algebra import Pattern


class CutAxis(NamedTuple):
    """One axis of the places, and how many of them a patch has."""

    length: int
    left: int
    right: int
    step: int
    """The distance of neighbours. The places of a patch lie as far apart, so that they share neighbours."""
    wraps: bool
    size: int = 1

    @property
    def longest(self) -> int:
        """The most places of a patch: one with each step to the end of the axis."""
        return self.length // self.step

    @property
    def has_room(self) -> bool:
        """Whether a patch has fewer keys than all places, and the steps around a periodic axis meet again."""
        return self._near <= self.longest and not (self.wraps and self.length % self.step)

    @property
    def _near(self) -> int:
        return self.left + self.size + self.right

    @property
    def keys(self) -> int:
        return self._near if self.has_room else self.length

    def starts(self) -> tuple[list[int], list[int]]:
        """Return the first place of each patch, and that of its keys; a periodic axis goes on before its start.

        At an end, the keys are the outermost ones. A window that is moved inwards lies among them; of one that
        is cut they hold more than is left.
        """
        queries, keys = [], []
        for first in range(min(self.step, self.length)):
            count = len(range(first, self.length, self.step))
            for start in range(0, count, self.size):
                start = min(start, count - self.size)
                queries.append(first + start * self.step)
                start -= self.left
                start = start if self.wraps else min(max(start, 0), count - self.keys)
                keys.append(first + start * self.step if self.has_room else 0)
        return queries, keys

    def place(self, starts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return for each place a patch that it is in, and its number there, from the first places of all."""
        by_place = [(0, 0)] * self.length
        # The last patch along the axis may overlap the one before: the later one gets what both have.
        for patch, start in enumerate(starts):
            for number in range(self.size):
                by_place[start + number * self.step] = patch, number
        patches, numbers = zip(*by_place, strict=True)
        return [*patches], [*numbers]


@dataclass(frozen=True, slots=True)
class SpacePatches:
    """Patches of all axes: each combination of a patch along each axis."""

    axes: tuple[CutAxis, ...]
    others: Pattern
    """The neighbourhood itself: a patch has keys that are no neighbours of some of its queries."""

    @property
    def blocks(self) -> int:
        return math.prod([len(axis.starts()[0]) for axis in self.axes])

    @property
    def queries(self) -> int:
        return math.prod([axis.size for axis in self.axes])

    @property
    def keys(self) -> int:
        return math.prod([axis.keys for axis in self.axes])

    def group(self, group: int) -> int:
        return group

    def key_lists(self, grid: ScoreGrid) -> KeyLists:
        """Return the tokens of each patch, which are numbered in C order, as the places are."""
        xp, bases = grid.xp, [axis.length for axis in self.axes]
        queries, keys, patches, numbers = [], [], [], []
        for axis in self.axes:
            of_queries, of_keys = axis.starts()
            queries.append(_column(grid, of_queries) + _row(grid, axis.size, axis.step))
            places = _column(grid, of_keys) + _row(grid, axis.keys, axis.step if axis.has_room else 1)
            keys.append((places + axis.length) % axis.length if axis.wraps else places)
            of_patches, of_numbers = axis.place(of_queries)
            patches.append(_column(grid, of_patches))
            numbers.append(_column(grid, of_numbers))
        counts, sizes = [len(axis.starts()[0]) for axis in self.axes], [axis.size for axis in self.axes]
        order = _combined(xp, patches, counts) * self.queries + _combined(xp, numbers, sizes)
        return KeyLists(_combined(xp, queries, bases), _combined(xp, keys, bases), xp.reshape(order, (-1,)))


def cut_space(axes: Sequence[CutAxis], size: PatchSize, pattern: Pattern) -> SpacePatches:
    """Return the smallest patches of a size, nearly as long along each axis."""
    patches = SpacePatches((*axes,), pattern)
    # Each query of a patch meets all its keys: the larger a patch, the fewer keys are copied for a query.
    while patches.queries < size.queries or patches.keys > size.copies * patches.queries:
        growing = [(axis.size, -n) for n, axis in enumerate(patches.axes) if 2 * axis.size <= axis.longest]
        if not growing:
            break
        shortest = -sorted(growing)[0][1]  # no `min`, which torch's compiler does not trace for tuples
        longer = [
            axis._replace(size=axis.size * (2 if n == shortest else 1)) for n, axis in enumerate(patches.axes)
        ]
        patches = SpacePatches((*longer,), pattern)
    return patches


def _column(grid: ScoreGrid, numbers: Sequence[int]) -> Array:
    return grid.xp.reshape(grid.put(numbers, grid.xp.int32), (-1, 1))


def _row(grid: ScoreGrid, count: int, step: int) -> Array:
    return grid.xp.reshape(grid.arange(0, count), (1, -1)) * step


def _combined(xp: Namespace, tables: Sequence[Array], bases: Sequence[int]) -> Array:
    """Return a row for each combination of rows of all tables, whose numbers are digits of these bases."""
    combined = tables[0]
    # By broadcasting: a loop over the patches of an image would take longer than their attention.
    for table, base in zip(tables[1:], bases[1:], strict=True):
        (a, b), (c, d) = combined.shape, table.shape
        digits = xp.reshape(combined, (a, 1, b, 1)) * base + xp.reshape(table, (1, c, 1, d))
        combined = xp.reshape(digits, (a * c, b * d))
    return combined
