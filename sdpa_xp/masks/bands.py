"""Masks along the diagonal: a query attends to keys at a bounded distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdpa_xp._checks.integers import Integers, IntegersLike, check_offset
from sdpa_xp._checks.keywords import check_integer, explains_keywords
from sdpa_xp._tiles.score_grid import ScoreGrid
from sdpa_xp._tiles.tile import Allowed, Tile, both
from sdpa_xp.masks.algebra import Mask, Pattern


@explains_keywords
def causal(offset: IntegersLike | Literal["lower_right"] = 0) -> Mask:
    """Return a causal mask: query i attends to key j if j <= i + offset.

        offset 0, L=3 S=5     "lower_right" (offset 2)
            1 0 0 0 0             1 1 1 0 0
            1 1 0 0 0             1 1 1 1 0
            1 1 1 0 0             1 1 1 1 1

    Shapes:
        `L` queries, `S` keys, `...` batch.

    Args:
        offset: The position of the first query among the keys. 0 aligns the upper left corner, as
            `is_causal=True` does. "lower_right" is S - L: the last query attends to all keys, as if the queries
            continued a cache. Pass another integer for another position, or one for each batch entry as a list
            or an integer array that broadcasts to (...).

    Returns:
        The mask. It works for any length and never builds an L x S array.

    Raises:
        TypeError: When a call uses the mask: the offset is not an integer, or belongs to another library.
        ValueError: The offset is a string other than "lower_right"; when a call uses the mask, the offset does
            not fit the batch.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.causal("lower_right"), (2, 3)).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])

    References:
        Vaswani et al., "Attention is all you need", arXiv 1706.03762, section 3.2.3.
    """
    return Causal(check_offset("causal", offset))


@explains_keywords
def sliding_window(
    left: int | None, right: int | None, *, offset: IntegersLike | Literal["lower_right"] = 0
) -> Mask:
    """Return a sliding window: query i attends to key j if i + offset - left <= j <= i + offset + right.

        left 1, right 0       left 1, right 1
            1 0 0 0 0             1 1 0 0 0
            1 1 0 0 0             1 1 1 0 0
            0 1 1 0 0             0 1 1 1 0

    Shapes:
        `L` queries, `S` keys, `...` batch.

    Args:
        left: The number of keys before its own position that a query attends to. None means all of them.
        right: The number of keys after its own position. None means all of them; 0 gives a causal window.
        offset: The position of the first query among the keys, as for `causal`.

    Returns:
        The mask. Tiles outside the window are skipped, so the work grows linearly with L.

    Raises:
        TypeError: `left` or `right` is not an integer; when a call uses the mask, the offset is not an integer.
        ValueError: `left` or `right` is negative, or the offset is a string other than "lower_right"; when a
            call uses the mask, the offset does not fit the batch.

    Examples:
        >>> from sdpa_xp import masks
        >>> masks.to_array(masks.sliding_window(1, 0), (3, 4)).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0]])

    References:
        Beltagy et al., "Longformer", arXiv 2004.05150, section 3.1. Jiang et al., "Mistral 7B",
        arXiv 2310.06825, section 2, counts the query's own key: a window of W there is left = W - 1, right = 0.
    """
    return SlidingWindow(_width("left", left), _width("right", right), check_offset("sliding_window", offset))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Causal(Mask):
    """Made by `causal`."""

    name = "causal"
    counts = "distances"
    ignores_heads = True
    offset: IntegersLike | Literal["lower_right"] = 0

    def bind(self, grid: ScoreGrid) -> Pattern:
        return Band(None, grid.check_offset("attn_mask.offset", self.offset))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SlidingWindow(Mask):
    """Made by `sliding_window`."""

    name = "sliding_window"
    counts = "distances"
    ignores_heads = True
    left: int | None
    right: int | None
    offset: IntegersLike | Literal["lower_right"] = 0

    def bind(self, grid: ScoreGrid) -> Pattern:
        offset = grid.check_offset("attn_mask.offset", self.offset)
        return Band(
            None if self.left is None else offset.plus(-self.left),
            None if self.right is None else offset.plus(self.right),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Band(Pattern):
    """A query at i attends to key j iff i + low <= j <= i + high; None is open."""

    low: Integers | None
    high: Integers | None

    def allowed_in(self, tile: Tile) -> Allowed:
        above: Allowed | None = self._all_above(tile)
        below: Allowed | None = self._all_below(tile)
        if above is None and self.low is not None and below is not False:
            above = tile.query_index + tile.slice_integers(self.low).values <= tile.key_index
        if below is None and self.high is not None and above is not False:
            below = tile.query_index + tile.slice_integers(self.high).values >= tile.key_index
        return False if above is None or below is None else both(above, below)

    @property
    def is_shared(self) -> bool:
        return all(side is None or isinstance(side.values, int) for side in (self.low, self.high))

    def uniform(self, tile: Tile) -> bool | None:
        answers = self._all_above(tile), self._all_below(tile)
        return False if False in answers else None if None in answers else True

    def key_range(self, tile: Tile) -> range:
        start, stop = tile.columns.start, tile.columns.stop
        if self.low is not None:
            start = int(max(start, tile.first_position + tile.slice_integers(self.low).least))
        if self.high is not None:
            stop = int(min(stop, tile.last_position + tile.slice_integers(self.high).most + 1))
        return range(start, stop)

    def query_range(self, tile: Tile) -> range:
        start, stop, position = tile.rows.start, tile.rows.stop, tile.grid.position
        if self.high is not None:  # the first query that attends to the first key
            most = position + tile.grid.position_spread
            start = int(max(start, tile.columns.start - tile.slice_integers(self.high).most - most))
        if self.low is not None:  # the last query that attends to the last key
            stop = int(min(stop, tile.columns.stop - tile.slice_integers(self.low).least - position))
        return range(start, stop)

    # The last query decides whether all attend, the first whether any does: no array is built for either.

    def _all_above(self, tile: Tile) -> bool | None:
        """Return whether i + low <= j holds for all pairs or for none; None if for some."""
        if self.low is None:
            return True
        low, (nearest, farthest) = tile.slice_integers(self.low), tile.distances
        return True if low.most <= nearest else False if low.least > farthest else None

    def _all_below(self, tile: Tile) -> bool | None:
        """Return whether j <= i + high holds for all pairs or for none; None if for some."""
        if self.high is None:
            return True
        high, (nearest, farthest) = tile.slice_integers(self.high), tile.distances
        return True if farthest <= high.least else False if nearest > high.most else None


def _width(name: str, keys: int | None) -> int | None:
    hint = "None is a side without a limit."
    return None if keys is None else check_integer("sliding_window", name, keys, least=0, hint=hint)
