"""A learned bias for each distance, in buckets that widen with the distance, as in T5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, cast

from .._checks.arrays import check_floating, check_known, check_plain_array
from .._checks.keywords import check_flag, check_integer, explains_keywords
from .._checks.score_arrays import Integers, check_columns, check_offset
from .._libraries.protocols import AnyArray, Array, Namespace
from .._tiles import Target, Tile
from .._tiles.grid import CallGrid
from ..errors import ArgumentValueError
from .algebra import AddedByDistance, Bias, Term

MOST_LISTED = 2**10
"""Up to this `max_distance` each distance has its number in a list, if only a run knows the distances."""


@explains_keywords
def relative(
    table: AnyArray,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    offset: int | Literal["lower_right"] = 0,
) -> Bias:
    """Return T5's relative position bias: table[bucket(j - i - offset), h] for query i and key j in head h.

    In each direction, half of the buckets hold one distance each. The others widen logarithmically up to
    `max_distance`, and all larger distances share the last bucket.

    Args:
        table: (buckets, Hq), floating, such as `relative_attention_bias.weight` of a T5 model.
        bidirectional: Whether later keys have their own half of the buckets, as in an encoder. If not, they
            share the bucket of distance 0.
        max_distance: The distance at which the last bucket begins.
        offset: As for `masks.causal`: one integer for all batch entries, or "lower_right".

    Returns:
        The bias. T5 uses it with `scale=1`.

    Raises:
        TypeError: `table` is not a floating array, or `max_distance` or the offset is not an integer.
        ValueError: `table` is not (buckets, Hq) of the call or has too few buckets, the offset is another
            string, or the buckets of one distance each already reach `max_distance`.

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
    array = check_plain_array("relative", "table", table)
    check_floating("relative", "table", array)
    both_ways = check_flag("relative", "bidirectional", bidirectional)
    check_known("relative", "table", array.shape)
    least = 4 if both_ways else 2  # buckets for near keys and for far ones, in each direction
    if array.ndim != 2 or array.shape[0] < least or (both_ways and array.shape[0] % 2):
        rule = f"`table` must be (buckets, Hq), with {least} buckets or more"
        rule += " and an even number of them" if both_ways else ""
        raise ArgumentValueError("relative", rule, {"table.shape": array.shape})
    exact = array.shape[0] // (4 if both_ways else 2)
    furthest = check_integer("relative", "max_distance", max_distance, least=exact + 1)
    shift = check_offset("relative", offset, "an integer")
    if not isinstance(shift, str):
        check_integer("relative", "offset", offset)
    return Relative(array, both_ways, furthest, shift)


def buckets(count: int, max_distance: int, first: int, last: int, *, bidirectional: bool) -> list[int]:
    """Return the bucket of each distance j - i from `first` to `last`."""
    begins = first_distances(count, max_distance, max(-first, last), bidirectional=bidirectional)
    behind = _of_consecutive(begins, max(0, -last), 1 - first)
    ahead = _of_consecutive(begins, max(1, first), last + 1)
    return [*reversed(behind), *((count // 2 + bucket if bidirectional else 0) for bucket in ahead)]


def _of_consecutive(begins: list[int], start: int, stop: int) -> list[int]:
    """Return the bucket of each distance of one direction, from `start` up to `stop`, run by run."""
    runs = enumerate(pairwise([0, *begins, stop]))  # no bisect, which torch's compiler does not trace
    return [n for n, (first, end) in runs for _ in range(max(first, start), min(end, stop))]


def first_distances(count: int, max_distance: int, furthest: int, *, bidirectional: bool) -> list[int]:
    """Return the smallest distance of each bucket of one direction except the first, up to `furthest`.

    There are `count` buckets. An estimate by the inverse of the formula is moved to where the formula changes.
    """
    count = count // 2 if bidirectional else count
    exact = count // 2
    begins = list(range(1, min(exact, furthest) + 1))
    for bucket in range(exact + 1, count):
        distance = math.floor(exact * (max_distance / exact) ** ((bucket - exact) / (count - exact)))
        if distance > furthest + 1:
            break
        while _bucket(distance, count, max_distance) >= bucket:
            distance -= 1
        while _bucket(distance, count, max_distance) < bucket:
            distance += 1
        begins.append(distance)
    return begins


def _bucket(distance: int, count: int, max_distance: int) -> int:
    exact = count // 2
    if distance < exact:
        return distance
    if distance >= max_distance:
        return count - 1
    share = math.log(distance / exact) / math.log(max_distance / exact)
    # A distance that is a bucket's first by the formula must not fall short of it by a rounding.
    # That is 1e-15 of `count`; and the next distance adds more than 1e-9, with 16 buckets up to distance 10**8.
    return min(exact + int(share * (count - exact) + 1e-9), count - 1)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Relative(Bias):
    """Made by `relative`."""

    name = "relative"
    counts = "distances"
    only_adds = True
    table: AnyArray
    bidirectional: bool = True
    max_distance: int = 128
    offset: int | Literal["lower_right"] = 0

    def bind(self, grid: CallGrid) -> tuple[Term, ...]:
        xp, table = grid.xp, cast(Array, self.table)
        grid.check_dtype("bias.table", table)
        check_columns(grid.function, "bias.table", table.shape[1], grid.heads)
        offset = grid.check_offset("bias.offset", self.offset)
        columns, count = xp.matrix_transpose(xp.astype(table, grid.dtype, copy=False)), table.shape[0]
        # The smallest and the largest distance in the call; distances beyond `max_distance` share a bucket.
        nearest, farthest = grid.distances()
        first = self._within(nearest - offset.most)
        last = max(first, self._within(farthest - offset.least))
        if math.isinf(farthest) and self.max_distance > MOST_LISTED and hasattr(xp, "searchsorted"):
            begins = grid.put(first_distances(count, last, last, bidirectional=self.bidirectional), xp.int32)
            ahead = count // 2 if self.bidirectional else 0
            return (RelativeTerm(columns, first, last, offset, grid.arange(0, count), count, begins, ahead),)
        index = buckets(count, self.max_distance, first, last, bidirectional=self.bidirectional)
        chosen = grid.put(index, xp.int32)
        return (RelativeTerm(xp.take(columns, chosen, axis=-1), first, last, offset, chosen, count),)

    def _within(self, distance: float) -> int:
        return int(max(-self.max_distance, min(distance, self.max_distance)))


@dataclass(frozen=True, slots=True, eq=False)
class RelativeTerm(AddedByDistance):
    """A number for each distance from `first` to `last`, (Hq, distances); the outermost for those beyond.

    With `begins`, it is a number for each bucket, which is searched: for distances that only a run knows, and
    that are too many for a list.
    """

    array_axes: ClassVar[Mapping[str, Any]] = {"table": (-3, None), "buckets": (None,), "begins": (None,)}
    table: Array
    first: int
    last: int
    offset: Integers
    buckets: Array
    """The bucket of each distance, int32."""
    count: int
    """The number of buckets."""
    begins: Array | None = None
    """The smallest distance of each bucket of one direction except the first, int32."""
    ahead: int = 0
    """The bucket of the first distance to a later key; with 0 they share that of distance 0."""

    def added(self, tile: Tile) -> Array:
        xp = tile.grid.xp
        nearest, farthest = tile.distances
        last, first = self.last + self.offset.most, self.first + self.offset.least
        if tile.block is None and (nearest >= last or farthest <= first):  # one number for each head
            edge = self.last - self.first if nearest >= last else 0
            return tile.grid.in_all_axes(tile.slice_heads(self.table)[:, edge], 2)
        index = self._index(xp, tile.key_index - tile.query_index)
        table = tile.slice_heads(self.table)
        chosen = xp.take(table, xp.reshape(index, (-1,)), axis=-1)
        *batch, rows, columns = index.shape  # with positions of their own, batch entries have an axis for heads
        chosen = xp.reshape(chosen, (table.shape[0], *batch[:-1], rows, columns))
        axes = range(1, chosen.ndim - 2)
        return xp.permute_dims(chosen, (*axes, 0, chosen.ndim - 2, chosen.ndim - 1)) if axes else chosen

    def at_distances(self, grid: CallGrid, distances: Array) -> Array:
        return grid.xp.expand_dims(grid.xp.take(self.table, self._index(grid.xp, distances), axis=-1), axis=-2)

    @property
    def gradient_target(self) -> Target:
        return Target((self.table.shape[0], self.count, 1), heads_last=True)

    def gradient(self, tile: Tile, _scores: Array, gradient: Array) -> Array:
        """Return the sums of the diagonals, each added to the bucket of its distance, (..., Hq, buckets, 1)."""
        xp, grid, block = tile.grid.xp, tile.grid, tile.block
        step = 1 if block is None else block.step
        sums = diagonals(grid, gradient, step)
        first = tile.columns.start - tile.rows.start - gradient.shape[-2] * step - grid.position.least
        distances = grid.arange(first, first + sums.shape[-1])
        index = self._index(xp, distances if block is None else distances - block.start)
        bucket = grid.in_all_axes(xp.take(self.buckets, index, axis=0))
        numbers = grid.in_all_axes(grid.arange(0, self.count), 1)
        inside = xp.astype((bucket <= numbers) & (bucket >= numbers), grid.dtype)  # (..., buckets, diagonals)
        return inside @ xp.expand_dims(sums, axis=-1)

    def _index(self, xp: Namespace, distance: Array) -> Array:
        """Return the column of `table` for each j - i."""
        distance = distance - self.offset.values
        if self.begins is not None:
            bucket = cast(Any, xp).searchsorted(self.begins, xp.abs(distance), side="right")
            return xp.where(distance > 0, bucket + self.ahead if self.ahead else 0, bucket)
        # `clip` would wait for a device: in some libraries it is an index by booleans.
        distance = xp.where(distance < self.first, self.first, distance)
        return xp.where(distance > self.last, self.last, distance) - self.first


def diagonals(grid: CallGrid, scores: Array, step: int = 1) -> Array:
    """Sum (..., rows, columns) over each diagonal j - step * i: (..., step * rows + columns + step).

    The first is that of -step * rows. If the array is read in rows that are longer by `step`, each row is
    shifted to the left by `step` against the row before, and diagonals become columns.
    """
    *leading, rows, columns = scores.shape
    before = step * rows
    xp = grid.xp

    def zeros(*shape: int) -> Array:
        return xp.zeros((*leading, *shape), dtype=grid.dtype, device=grid.device)

    shifted = xp.reshape(xp.concat([zeros(rows, before), scores], axis=-1), (*leading, -1))
    shape = (*leading, rows, before + columns + step)
    longer = xp.reshape(xp.concat([shifted, zeros(before)], axis=-1), shape)
    return xp.sum(longer, axis=-2)
