"""A mask in a call: a pattern, which answers for one tile at a time, so that no L x S array is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .._libraries.protocols import Array
from .._tiles.score_grid import ScoreGrid
from .._tiles.tile import Allowed, Tile, TilePlace, both, collapse_uniform, either

if TYPE_CHECKING:
    from .._tiles.key_lists import Patches
    from .._tiles.on_device import BlockBounds


class Pattern(ABC):
    """A mask that is bound to the grid of a call."""

    array_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {}
    """The axes of the scores along which the axes of an array lie, if it does not broadcast to the scores."""

    @abstractmethod
    def allowed_in(self, tile: Tile, /) -> Allowed:
        """Return which pairs of the tile may attend; an array broadcasts to (..., Hq, rows, columns)."""

    @property
    def is_shared(self) -> bool:
        """Whether all batch entries and heads have the same answers, few of them arrays: tasks share these."""
        return False

    def uniform(self, _tile: Tile, /) -> bool | None:
        """Return the answer if it is known to be the same for every pair; None if only `allowed_in` can tell.

        No array of the size of the tile is built for it.
        """
        return None

    def key_bounds(self, _tile: Tile, /) -> tuple[float, float]:
        """Return the first key that some query of the tile may attend, and the last + 1; infinite if unknown.

        They follow from the numbers of the mask, and may be values of a graph, which holds no `range` of them.
        """
        return float("-inf"), float("inf")

    def key_range(self, tile: Tile, /) -> range:
        """Return one range of the tile's keys outside of which no query attends; tiles outside are skipped."""
        start, stop = self.key_bounds(tile)
        return range(int(max(tile.columns.start, start)), int(min(tile.columns.stop, stop)))

    def query_range(self, tile: Tile, /) -> range:
        """Return one range of the tile's queries outside of which none attends to a key of the tile."""
        return tile.rows

    def patches(self, _grid: ScoreGrid, _others: tuple[Pattern, ...] = (), /) -> Patches | None:
        """Return blocks of queries that each read a list of keys; None if ranges of keys serve as well.

        A pair has to be in the `others` too.
        """
        return None


class FormulaPattern(Pattern, ABC):
    """A pattern that computes its formula for the tiles in which `uniform` does not know the answer."""

    def allowed_in(self, tile: Tile) -> Allowed:
        answer = self.uniform(tile)
        return self.formula(tile) if answer is None else answer

    @abstractmethod
    def formula(self, tile: Tile, /) -> Allowed:
        """Return which pairs of the tile may attend, an array that broadcasts to (..., Hq, rows, columns)."""


@dataclass(frozen=True, slots=True)
class Joined(Pattern, ABC):
    """Patterns that one operator joins."""

    patterns: tuple[Pattern, ...] = ()

    @property
    def is_shared(self) -> bool:
        return all(pattern.is_shared for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class AllOf(Joined):
    """A pair may attend iff it is in every pattern; without patterns every pair may."""

    def allowed_in(self, tile: Tile) -> Allowed:
        allowed: Allowed = True
        for pattern in self.patterns:
            allowed = both(allowed, pattern.allowed_in(tile))
            if allowed is False:  # the other patterns need not be computed
                break
        return allowed

    def uniform(self, tile: Tile) -> bool | None:
        answers = [pattern.uniform(tile) for pattern in self.patterns]
        # Two patterns may each have pairs in a tile, and no key in common.
        if False in answers or not self.key_range(tile):
            return False
        return None if None in answers else True

    def key_range(self, tile: Tile) -> range:
        return _intersection([tile.columns, *(pattern.key_range(tile) for pattern in self.patterns)])

    def query_range(self, tile: Tile) -> range:
        return _intersection([tile.rows, *(pattern.query_range(tile) for pattern in self.patterns)])

    def patches(self, grid: ScoreGrid, others: tuple[Pattern, ...] = ()) -> Patches | None:
        for n, pattern in enumerate(self.patterns):
            rest = self.patterns[:n] + self.patterns[n + 1 :] + others
            if (patches := pattern.patches(grid, rest)) is not None:
                return patches
        return None


@dataclass(frozen=True, slots=True)
class AnyOf(Joined):
    """A pair may attend iff it is in one of the patterns."""

    def allowed_in(self, tile: Tile) -> Allowed:
        allowed: Allowed = False
        for pattern in self.patterns:
            allowed = either(allowed, pattern.allowed_in(tile))
            if allowed is True:
                break
        return allowed

    def uniform(self, tile: Tile) -> bool | None:
        answers = [pattern.uniform(tile) for pattern in self.patterns]
        return True if True in answers else None if None in answers else False

    # One range holds all: what lies between two of them is computed, and masked.

    def key_range(self, tile: Tile) -> range:
        return _hull([pattern.key_range(tile) for pattern in self.patterns])

    def query_range(self, tile: Tile) -> range:
        return _hull([pattern.query_range(tile) for pattern in self.patterns])


@dataclass(frozen=True, slots=True)
class NoneOf(Pattern):
    """A pair may attend iff it is not in the pattern."""

    pattern: Pattern

    # It has no `key_range`: the complement of one range of keys is two.

    def allowed_in(self, tile: Tile) -> Allowed:
        allowed = self.pattern.allowed_in(tile)
        return not allowed if isinstance(allowed, bool) else ~allowed

    @property
    def is_shared(self) -> bool:
        return self.pattern.is_shared

    def uniform(self, tile: Tile) -> bool | None:
        answer = self.pattern.uniform(tile)
        return None if answer is None else not answer


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPattern(Pattern):
    """A pair may attend iff an array, which broadcasts to (..., Hq, L, S), is True there."""

    array: Array
    bounds: BlockBounds | None = None
    """1 where all elements of a block are True, 0 where none is; None if a device was not asked."""

    def allowed_in(self, tile: Tile) -> Allowed:
        if self.bounds is not None and (answer := self.uniform(tile)) is not None:
            return answer
        return collapse_uniform(tile, tile.slice(self.array))

    def uniform(self, tile: Tile) -> bool | None:
        if self.bounds is not None:
            least, most = self.bounds.within(tile.rows, tile.columns)
            return bool(least) if least == most else None
        answer = self.allowed_in(tile) if tile.grid.may_read(self.array) else None
        return answer if isinstance(answer, bool) else None


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPattern(Pattern):
    """A pattern that is asked about another tile."""

    # Only a device may know the place, and positions are not read: it has no `uniform`, and bounds no range.

    place: TilePlace
    pattern: Pattern

    def allowed_in(self, tile: Tile) -> Allowed:
        return self.pattern.allowed_in(self.place.placed_tile(tile))


def _intersection(ranges: list[range]) -> range:
    return range(max(r.start for r in ranges), min(r.stop for r in ranges))


def _hull(ranges: list[range]) -> range:
    """Return the smallest range that contains all of `ranges`."""
    nonempty = [r for r in ranges if r]
    return range(min(r.start for r in nonempty), max(r.stop for r in nonempty)) if nonempty else range(0)
