"""The textbook formula for small calls of one tile, without the objects that cut a call into tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

from .._libraries import LARGEST, dtype_name
from .._libraries.protocols import Array, Dtype, Namespace, Ufuncs
from .._run.products import avoid_zero_sum, faster_product, matmul_grouped
from .._tiles.plan import Plan
from .scores import Scores


class OneTile(NamedTuple):
    """The textbook formula for a small call of one tile, and what it needs besides query, key and value.

    For a few hundred scores, the formula takes less time than the objects that cut a call into tiles: with
    them, a call of 2 heads and 8 x 8 scores takes 2.3 times as long, and a step of a decoder with 64 keys 1.9
    times (one core). So what depends only on shapes and options is computed once for equal calls.
    """

    xp: Namespace
    functions: Ufuncs
    scale: float
    keys: slice | None
    """The keys that some query may attend to; None is all of them."""
    allowed: Array | None
    """The pairs that may attend; None is all of them."""
    multiply: Callable[[Namespace, Array, Array], Array]
    """Multiplies the query and the transposed keys."""
    least: float
    """The most negative finite score, for the maximum of a row without keys."""

    def attend(self, query: Array, key: Array, value: Array) -> Array | None:
        """Return the output; None if a masked NaN or inf may be in it."""
        xp, functions = self.xp, self.functions
        if self.keys is not None:
            key, value = key[..., self.keys, :], value[..., self.keys, :]
        s = self.multiply(xp, query * self.scale, functions.swapaxes(key, -1, -2))
        if self.allowed is not None:
            s = xp.where(self.allowed, s, -math.inf)
        s -= functions.maximum.reduce(s, axis=-1, keepdims=True, initial=self.least)
        p = functions.exp(s, out=s)
        l = functions.add.reduce(p, axis=-1, keepdims=True)
        o = matmul_grouped(xp, p, value)
        o /= avoid_zero_sum(l)
        # A masked NaN or inf shows in the sum. Keys outside of `keys` are never read.
        is_clean = self.allowed is None or math.isfinite(functions.add.reduce(o, axis=None))
        return o if is_clean else None


def one_tile(scores: Scores, plan: Plan, dtype: Dtype) -> OneTile | None:
    """Return the formula of a call; None if the call has other options, several tiles or no key."""
    grid, options = scores.grid, scores.options
    if not options.is_plain or dtype != grid.dtype:
        return None
    if not grid.library.has_ufuncs or not plan.is_small or not grid.keys:  # without a key, a tile may be large
        return None
    keys, allowed = None, None
    if options.has_mask:
        # The answer of the mask is kept with the call, so the call must be small; that for one query is.
        is_small = scores.known_tiles is not None or plan.queries == 1
        tiles = [*scores.tiles(range(plan.queries), plan)] if is_small else []
        if len(tiles) != 1:
            return None
        [(tile, answer)] = tiles
        if len(tile.columns) < plan.keys:
            keys = slice(tile.columns.start, tile.columns.stop)
        if not isinstance(answer, bool):
            allowed = answer
    columns = grid.keys if keys is None else keys.stop - keys.start
    multiply = faster_product(scores.query, scores.key.heads, columns) or matmul_grouped
    least = -LARGEST[dtype_name(grid.dtype)]
    return OneTile(grid.xp, cast(Ufuncs, grid.xp), cast(float, options.scale), keys, allowed, multiply, least)
