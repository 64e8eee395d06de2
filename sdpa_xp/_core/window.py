"""A window of a larger grid of scores: a range of queries and a range of keys, computed as a separate call.

The tiles of the window are tiles of the larger grid. Masks, biases and dropout are bound to the larger grid.
They see the same pair indices as in a single call, and so give the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from sdpa_xp._core.dropout import Dropout
from sdpa_xp._core.scores import BoundOptions
from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp._tiles.allowed import Allowed
from sdpa_xp._tiles.gradient_target import GradientTarget
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import Tile, WindowPlace, shifted
from sdpa_xp.biases.algebra import Term
from sdpa_xp.masks.algebra import AllOf, Pattern


class Window(NamedTuple):
    """A part of a grid, whose masks and biases hold this part of their arrays."""

    whole: ScoreGrid
    origin: Shape
    """The first index on each of the axes (..., Hq, L, S)."""
    shape: Shape
    """The lengths on these axes."""

    @property
    def grid(self) -> ScoreGrid:
        """The grid of the window alone."""
        *batch, heads, queries, keys = self.shape
        return replace(self.whole, batch=tuple(batch), heads=heads, queries=queries, keys=keys, entries=None)

    def tile_of_whole(self, tile: Tile) -> Tile:
        """Return a tile of the window as a tile of the whole grid."""
        *leading, queries, keys = self.origin
        ranges = map(range, self.shape[:-2]) if tile.leading is None else tile.leading
        return Tile(
            shifted(tile.rows, queries),
            shifted(tile.columns, keys),
            self.whole,
            tuple(shifted(r, first) for r, first in zip(ranges, leading, strict=True)),
            origin=self.origin,
        )

    def options(self, options: BoundOptions) -> BoundOptions:
        """Return options of the whole grid as options of the window."""
        return _asked_about(self, options, WindowPattern(self, options.mask))


class PlacedWindow(NamedTuple):
    """A part of a grid on one of several devices that run one program. Only the device knows its place."""

    whole: ScoreGrid
    placement: WindowPlace

    @property
    def grid(self) -> ScoreGrid:
        """The grid of the window alone."""
        return replace(self.whole, queries=self.placement.queries, keys=self.placement.keys)

    def tile_of_whole(self, tile: Tile) -> Tile:
        """Return the tile of the whole grid that has the pairs of a tile of the window.

        The tile spans all keys of the window.
        """
        rows, columns = range(self.whole.queries), range(self.whole.keys)
        return Tile(rows, columns, self.whole, tile.leading, tile.block, placement=self.placement)

    def options(self, options: BoundOptions) -> BoundOptions:
        """Return options of the whole grid as options of the window."""
        return _asked_about(self, options, PlacedPattern(self, options.mask))


def _asked_about(window: Window | PlacedWindow, options: BoundOptions, mask: Pattern) -> BoundOptions:
    is_trivial = isinstance(options.mask, AllOf) and not options.mask.patterns
    dropout = options.dropout
    return options._replace(
        mask=options.mask if is_trivial else mask,
        biases=tuple(WindowTerm(window, term) for term in options.biases),
        dropout=None if dropout is None else WindowDropout(dropout.p, dropout.seed, window),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPattern(Pattern):
    """A mask of the whole grid, asked about a window whose place is not known: it skips no key."""

    window: PlacedWindow
    pattern: Pattern

    def allowed_in(self, tile: Tile) -> Allowed:
        return self.pattern.allowed_in(self.window.tile_of_whole(tile))


@dataclass(frozen=True, slots=True, eq=False)
class WindowPattern(Pattern):
    """A mask of the whole grid, asked about tiles of a window."""

    window: Window
    pattern: Pattern

    def allowed_in(self, tile: Tile) -> Allowed:
        return self.pattern.allowed_in(self.window.tile_of_whole(tile))

    def uniform(self, tile: Tile) -> bool | None:
        return self.pattern.uniform(self.window.tile_of_whole(tile))

    def key_range(self, tile: Tile) -> range:
        return shifted(self.pattern.key_range(self.window.tile_of_whole(tile)), -self.window.origin[-1])

    def query_range(self, tile: Tile) -> range:
        return shifted(self.pattern.query_range(self.window.tile_of_whole(tile)), -self.window.origin[-2])


@dataclass(frozen=True, slots=True, eq=False)
class WindowTerm(Term):
    """A bias of the whole grid, asked about tiles of a window."""

    window: Window | PlacedWindow
    term: Term

    def apply(self, tile: Tile, scores: Array, *, in_place: bool = False) -> tuple[Array, Allowed]:
        return self.term.apply(self.window.tile_of_whole(tile), scores, in_place=in_place)

    @property
    def is_of_caller(self) -> bool:
        return self.term.is_of_caller

    @property
    def gradient_target(self) -> GradientTarget | None:
        return self.term.gradient_target

    def gradient(self, tile: Tile, scores: Array, gradient: Array) -> Array | None:
        return self.term.gradient(self.window.tile_of_whole(tile), scores, gradient)


@dataclass(frozen=True, slots=True, eq=False)
class WindowDropout(Dropout):
    """Dropout of the whole grid, for tiles of a window."""

    window: Window | PlacedWindow

    def apply(self, tile: Tile, weights: Array) -> Array:
        return Dropout.apply(self, self.window.tile_of_whole(tile), weights)
