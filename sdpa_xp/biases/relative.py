"""A learned bias for each distance, in buckets that widen with it, as T5 has it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from sdpa_xp import checks
from sdpa_xp.biases.algebra import Added, Bias, Term
from sdpa_xp.pairs import Pairs
from sdpa_xp.protocols import AnyArray, Array, Namespace
from sdpa_xp.tiles import Tile
from sdpa_xp.totals import Learned


def relative(
    table: AnyArray, *, bidirectional: bool = True, max_distance: int = 128, offset: int | str = 0
) -> Bias:
    r"""`table[bucket(j - i - offset), h]` for query i and key j in head h.

    The first half of the buckets of a direction holds one distance each; the others widen logarithmically up
    to `max_distance`, beyond which all share the last.

    Shapes:
        `Hq` query heads, `L` queries, `S` keys.

    Args:
        table: (buckets, Hq), floating: `relative_attention_bias.weight` of a T5 model.
        bidirectional: Whether later keys have buckets of their own, half of them, as in an encoder; else
            all of them share the bucket of distance 0.
        max_distance: Where the last bucket begins.
        offset: Which key the first query stands at: an integer, or "lower_right" for S - L.

    Returns:
        The bias. T5 computes attention with it and with `scale=1`.

    Raises:
        TypeError: A table that is no floating array, or a distance that is no integer.
        ValueError: A table that is not (buckets, Hq), too few buckets, or a `max_distance` that the buckets of
            one distance each already reach; when a call uses the bias, a table for another number of heads.

    Examples:
        >>> import numpy as np
        >>> from sdpa_xp import biases
        >>> table = np.arange(8.0)[:, None]
        >>> biases.to_array(biases.relative(table, max_distance=16), (1, 3, 4))
        array([[[0., 5., 6., 6.],
                [1., 0., 5., 6.],
                [2., 1., 0., 5.]]])

    References:
        Raffel et al., "T5", arXiv 1910.10683, section 2.1.
    """
    array = checks.plain_array("relative", "table", table)
    checks.floating("relative", "table", array)
    both_ways = checks.flag("relative", "bidirectional", bidirectional)
    checks.bucket_table("relative", array.shape, both_ways)
    exact = array.shape[0] // (4 if both_ways else 2)
    furthest = checks.integer("relative", "max_distance", max_distance, least=exact + 1)
    shift = offset if isinstance(offset, str) else checks.integer("relative", "offset", offset)
    return Relative(array, both_ways, furthest, shift)


def buckets(count: int, max_distance: int, span: int, *, bidirectional: bool) -> list[int]:
    """The bucket of each distance j - i from -span to span."""
    count = count // 2 if bidirectional else count
    away = [_bucket(distance, count, max_distance) for distance in range(span + 1)]
    ahead = [count + bucket if bidirectional else 0 for bucket in away]
    return [*reversed(away), *ahead[1:]]


def _bucket(distance: int, count: int, max_distance: int) -> int:
    exact = count // 2
    if distance < exact:
        return distance
    if distance >= max_distance:
        return count - 1
    share = math.log(distance / exact) / math.log(max_distance / exact)
    # A distance that is a bucket's first by the formula must not fall short of it by a rounding.
    return min(exact + int(share * (count - exact) + 1e-9), count - 1)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Relative(Bias):
    """Made by `relative`."""

    name = "relative"
    table: AnyArray
    bidirectional: bool = True
    max_distance: int = 128
    offset: int | str = 0

    def bind(self, pairs: Pairs) -> tuple[Term, ...]:
        xp, table = pairs.xp, cast(Array, self.table)
        pairs.fits("bias.table", table)
        checks.columns(pairs.function, "bias.table", table.shape[1], pairs.heads)
        offset = cast(int, pairs.offset("bias.offset", self.offset).values)
        # no pair of the call is farther apart
        span = min(self.max_distance, pairs.queries + pairs.keys + abs(pairs.position) + abs(offset))
        index = buckets(table.shape[0], self.max_distance, span, bidirectional=self.bidirectional)
        chosen = xp.asarray(index, dtype=xp.int32, device=pairs.device)
        by_distance = xp.take(xp.astype(table, pairs.dtype, copy=False), chosen, axis=0)
        return (ByDistance(xp.matrix_transpose(by_distance), span, offset, chosen, table.shape[0]),)


@dataclass(frozen=True, slots=True, eq=False)
class ByDistance(Added):
    """A number for each distance, (Hq, 2 * furthest + 1), the outermost for all beyond."""

    table: Array
    furthest: int
    offset: int
    buckets: Array
    """Where each of them was taken from, int32."""
    count: int
    """How many buckets there are."""

    def added(self, tile: Tile) -> Array:
        xp = tile.pairs.xp
        index = self._index(xp, tile.key_index - tile.query_index)
        table = tile.of_heads(self.table)
        chosen = xp.take(table, xp.reshape(index, (-1,)), axis=-1)
        return xp.reshape(chosen, (table.shape[0], *index.shape))

    @property
    def learned(self) -> Learned:
        return Learned((self.table.shape[0], self.count, 1), heads_last=True)

    def gradient(self, tile: Tile, _scores: Array, gradient: Array) -> Array:
        """(..., Hq, buckets, 1): sums of the diagonals, each to the bucket of its distance."""
        xp, pairs = tile.pairs.xp, tile.pairs
        sums = diagonals(pairs, gradient)
        first = tile.columns.start - tile.rows.stop - pairs.position
        index = self._index(xp, xp.arange(first, first + sums.shape[-1], dtype=xp.int32, device=pairs.device))
        bucket = xp.take(self.buckets, index, axis=0)
        numbers = xp.reshape(xp.arange(0, self.count, dtype=xp.int32, device=pairs.device), (-1, 1))
        inside = xp.astype((bucket <= numbers) & (bucket >= numbers), pairs.dtype)  # (buckets, diagonals)
        return inside @ xp.expand_dims(sums, axis=-1)

    def _index(self, xp: Namespace, distance: Array) -> Array:
        """Where the number of each j - i is."""
        return xp.clip(distance - self.offset, -self.furthest, self.furthest) + self.furthest


def diagonals(pairs: Pairs, scores: Array) -> Array:
    """Sums of (..., rows, columns) over each diagonal, (..., rows + columns + 1); j - i is -rows for the first.

    Read in rows that are longer by one, each row stands one further to the left than the one before.
    """
    *leading, rows, columns = scores.shape
    xp = pairs.xp

    def zeros(*shape: int) -> Array:
        return xp.zeros((*leading, *shape), dtype=pairs.dtype, device=pairs.device)

    shifted = xp.reshape(xp.concat([zeros(rows, rows), scores], axis=-1), (*leading, -1))
    longer = xp.reshape(xp.concat([shifted, zeros(rows)], axis=-1), (*leading, rows, rows + columns + 1))
    return xp.sum(longer, axis=-2)
