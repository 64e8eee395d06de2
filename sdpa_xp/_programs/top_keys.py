"""The keys with the largest scores of each query, one tile of keys after the other.

Of equal scores, the first key wins: tiles come in the order of the keys, the first maximum of a tile is taken,
and a score replaces another only if it is larger.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

from .._libraries.protocols import Array, Namespace
from .._tiles import Tile
from .._tiles.grid import ScoreGrid


class LargestScores(NamedTuple):
    """The largest scores of each row so far and their keys, (..., Hq, rows, n), the largest first."""

    scores: Array
    """-inf where a row has fewer keys."""
    keys: Array
    """int32; -1 where a row has fewer keys."""

    @staticmethod
    def none(grid: ScoreGrid, like: Array, count: int) -> LargestScores:
        """Return rows (..., rows, `count`) without keys, for the rows of `like`."""
        shape, xp = (*like.shape[:-1], count), grid.xp
        scores = xp.full(shape, -math.inf, dtype=grid.dtype, device=grid.device)
        return LargestScores(scores, xp.full(shape, -1, dtype=xp.int32, device=grid.device))

    def padded(self, xp: Namespace, count: int) -> LargestScores:
        """Return `count` scores and keys."""
        missing = count - self.keys.shape[-1]
        if not missing:
            return self
        shape = (*self.keys.shape[:-1], missing)
        # Made from arrays that are here: they may be traced, and only they know their device.
        scores = xp.broadcast_to(xp.zeros_like(self.scores[..., :1]) - math.inf, shape)
        keys = xp.broadcast_to(xp.zeros_like(self.keys[..., :1]) - 1, shape)
        return LargestScores(xp.concat([self.scores, scores], axis=-1), xp.concat([self.keys, keys], axis=-1))


def top_of_tile(tile: Tile, s: Array, m: Array, k: int, top: LargestScores | None) -> LargestScores:
    """Return the `k` largest of `top` and of the scores of a tile, whose rows have the maximum `m`."""
    if tile.grid.access.is_writeable:
        top = LargestScores.none(tile.grid, s, k) if top is None else top
        _replace_smaller(tile, s, m, k, top)
        return top
    return _largest(tile, s, k, top)


def _largest(tile: Tile, s: Array, k: int, top: LargestScores | None) -> LargestScores:
    """Find one maximum after the other, with functions that every library has, also inside a trace."""
    xp, grid = tile.grid.xp, tile.grid
    if top is None and grid.placement is not None:  # a run may have fewer keys than k
        top = LargestScores.none(grid, s, k)
    before = 0 if top is None else top.keys.shape[-1]
    remaining = s if top is None else xp.concat([top.scores, s], axis=-1)
    places = grid.in_all_axes(xp.reshape(grid.arange(0, remaining.shape[-1]), (1, remaining.shape[-1])))
    scores, keys = [], []
    for _ in range(k if before == k else min(k, remaining.shape[-1])):
        largest = xp.max(remaining, axis=-1, keepdims=True)
        # No `argmax`: its int64 is a dtype that not every device has.
        is_largest = remaining >= largest
        place = xp.min(xp.where(is_largest, places, remaining.shape[-1]), axis=-1, keepdims=True)
        is_place = cast(Array, places == place)
        key = place + (tile.columns.start - before)
        if top is not None:
            old = xp.max(xp.where(is_place[..., :before], top.keys, -1), axis=-1, keepdims=True)
            key = xp.where(place < before, old, key)
        scores.append(largest)
        keys.append(xp.where(largest > -math.inf, key, -1))
        remaining = xp.where(is_place, -math.inf, remaining)
    return LargestScores(xp.concat(scores, axis=-1), xp.concat(keys, axis=-1))


def _replace_smaller(tile: Tile, s: Array, m: Array, k: int, top: LargestScores) -> None:
    """Write larger scores of a tile over those of `top`.

    After the first tiles few rows have a larger score, so only these rows are searched: `argmax` of whole tiles
    would take longer than their scores.
    """
    xp, columns = tile.grid.xp, s.shape[-1]
    count = math.prod(s.shape[:-1])
    scores, keys = (xp.reshape(array, (count, k)) for array in top)  # views
    (rows,) = xp.nonzero(xp.reshape(m, (count,)) > scores[:, -1])
    if not rows.shape[0]:
        return
    remaining, least = xp.reshape(s, (count, columns))[rows, :], scores[rows, -1]
    new = LargestScores.none(tile.grid, remaining, min(k, columns))
    which = every = tile.grid.arange(0, rows.shape[0])
    for n in range(min(k, columns)):
        place = xp.argmax(remaining, axis=-1)
        largest = remaining[every[: place.shape[0]], place]
        (larger,) = xp.nonzero(largest > least)
        if not larger.shape[0]:
            break
        # A row without a larger score may stay, since `top` comes first among equal scores, and a copy takes as
        # long as a search: up to 1.3 times as long in all (1,024 keys, k = 8).
        if 2 * larger.shape[0] < place.shape[0]:
            remaining, least, which, place, largest = (
                x[larger, ...] for x in (remaining, least, which, place, largest)
            )
        new.scores[which, n], new.keys[which, n] = largest, xp.astype(place + tile.columns.start, xp.int32)
        remaining[every[: place.shape[0]], place] = -math.inf
    joined = [
        xp.concat([old[rows, :], larger_part], axis=-1)
        for old, larger_part in zip((scores, keys), new, strict=True)
    ]
    order = xp.argsort(-joined[0], axis=-1, stable=True)[:, :k]
    scores[rows, :], keys[rows, :] = (xp.take_along_axis(array, order, axis=-1) for array in joined)
