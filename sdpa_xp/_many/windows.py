"""A window of a larger grid of scores: a range of queries and a range of keys, computed as a call of its own.

The tiles of the window are tiles of the larger grid. Masks, biases and dropout are bound to the larger grid.
They see the same pair indices as in a single call, and so give the same result. The states of windows with the
same queries merge to the state over all keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, cast

from .._libraries import namespace_of
from .._libraries.protocols import Array, Shape
from .._programs import BoundOptions, Scores
from .._programs.dropout import Dropout
from .._programs.output import attend
from .._programs.softmax import merge
from .._tiles import ArraySource, Tile, shifted
from .._tiles.grid import ScoreGrid, WindowBounds
from .._tiles.plan import Plan, plan_tiles
from ..biases.algebra import PlacedTerm
from ..masks.algebra import PlacedPattern

State: TypeAlias = tuple[Array, Array, Array]
"""Output (..., Hq, L, Ev), and two numbers that add up to the log-sum-exp (..., Hq, L).

All have the accumulation dtype.
"""


class Window(NamedTuple):
    """A part of a grid, whose masks and biases hold this part of their arrays."""

    whole: ScoreGrid
    origin: Shape
    """The first index on each of the axes (..., Hq, L, S)."""
    shape: Shape
    """The lengths on these axes."""

    @property
    def grid(self) -> ScoreGrid:
        *batch, heads, queries, keys = self.shape
        # Masks and dropout ask the whole grid for the numbers of batch entries.
        return replace(self.whole, batch=tuple(batch), heads=heads, queries=queries, keys=keys, part=None)

    def placed_tile(self, tile: Tile) -> Tile:
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


class PlacedWindow(NamedTuple):
    """A part of a grid on one of several devices that run one program. Only the device knows its place."""

    whole: ScoreGrid
    placement: WindowBounds

    @property
    def grid(self) -> ScoreGrid:
        return replace(self.whole, queries=self.placement.queries, keys=self.placement.keys)

    def placed_tile(self, tile: Tile) -> Tile:
        """Return the tile of the whole grid that has the pairs of a tile of the window.

        The tile spans all keys of the window.
        """
        rows, columns = range(self.whole.queries), range(self.whole.keys)
        return Tile(rows, columns, self.whole, tile.leading, tile.block, placement=self.placement)


@dataclass(frozen=True, slots=True, eq=False)
class WindowPattern(PlacedPattern):
    """A mask of the whole grid, asked about a window at a known place, so that tiles are skipped."""

    place: Window

    @property
    def is_shared(self) -> bool:
        return self.pattern.is_shared

    def uniform(self, tile: Tile) -> bool | None:
        return self.pattern.uniform(self.place.placed_tile(tile))

    def key_range(self, tile: Tile) -> range:
        return shifted(self.pattern.key_range(self.place.placed_tile(tile)), -self.place.origin[-1])

    def query_range(self, tile: Tile) -> range:
        return shifted(self.pattern.query_range(self.place.placed_tile(tile)), -self.place.origin[-2])


@dataclass(frozen=True, slots=True, eq=False)
class WindowDropout(Dropout):
    """Dropout of the whole grid, for tiles of a window."""

    place: Window | PlacedWindow

    def apply(self, tile: Tile, weights: Array) -> Array:
        return Dropout.apply(self, self.place.placed_tile(tile), weights)


def window_scores(window: Window | PlacedWindow, query: Array, key: Array, options: BoundOptions) -> Scores:
    """Return the scores of a window; the options are bound to the whole grid, with the window's arrays."""
    mask, dropout = options.mask, options.dropout
    if options.has_mask:  # a call without a mask asks about no tile
        mask = WindowPattern(window, mask) if isinstance(window, Window) else PlacedPattern(window, mask)
    of_window = options._replace(
        mask=mask,
        biases=tuple(PlacedTerm(window, term) for term in options.biases),
        dropout=None if dropout is None else WindowDropout(dropout.p, dropout.seed, window),
    )
    return Scores(window.grid, query, ArraySource(key), of_window)


def window_plan(scores: Scores, value: Array) -> Plan:
    """Return the tiles of a window, in one thread: a scheduler computes as many windows at a time as it can."""
    return replace(plan_tiles(scores.grid, scores.group, scores.query.shape[-1] + value.shape[-1]), threads=1)


def window_state(scores: Scores, value: Array) -> State:
    """Return attention over the keys of a window."""
    plan = window_plan(scores, value)
    # In two parts: their sum would be rounded, and with it the weight of the state when it is merged.
    results = attend(scores, ArraySource(value), plan, scores.grid.dtype, "output", "lse_parts")
    lse = results["lse_parts"]
    return results["output"], lse[..., 0], lse[..., 1]


def state_without_keys(grid: ScoreGrid, shape: Shape, width: int) -> State:
    """Return the state of queries, (..., Hq, L), that attend to no key: 0, -inf and 0."""
    lse = grid.xp.full(shape, -math.inf, dtype=grid.dtype, device=grid.device)
    zeros = grid.xp.zeros((*shape, width), dtype=grid.dtype, device=grid.device)
    return zeros, lse, grid.xp.zeros_like(lse)


def merge_windows(states: Sequence[State], sinks: Array | None = None) -> State:
    """Merge states of the same queries over different keys, and the sinks, (..., Hq, 1, 1)."""
    output, lse, _ = states[0]
    xp, parts = namespace_of(output), cast("list[tuple[Array, Array, Array | float]]", [*states])
    if sinks is not None:  # a sink is the state of a key whose value is 0
        parts.append((xp.zeros_like(output), xp.broadcast_to(sinks[..., 0], lse.shape), 0.0))
    return merge(xp, parts) if len(parts) > 1 else states[0]
