"""Each bias of the library as what it adds to the scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from sdpa_xp import biases
from sdpa_xp._checks.score_arrays import check_broadcasts, check_columns
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export import _arrays as xp
from sdpa_xp_export._arrays import ops
from sdpa_xp_export._call.mask_analysis import may_mask
from sdpa_xp_export._call.operands import Initializer, Input, kind_of
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.lowering.formula import biased_by_formula, call_index_function
from sdpa_xp_export.lowering.masks import AllowedPairs, both_allow
from sdpa_xp_export.lowering.tile import GraphTile
from sdpa_xp_export.spec import as_lengths

LISTED = 2**10
"""Up to this `max_distance` a graph holds the bucket of each distance; beyond, where each bucket begins."""


def add_biases(
    terms: Sequence[Bias], tile: GraphTile, scores: GraphValue, allowed: AllowedPairs
) -> tuple[GraphValue, AllowedPairs]:
    """scores -> scores with one bias after the other, and the pairs of `allowed` that no bias masks."""
    for bias in terms:
        inner, placed = _placed(bias, tile)
        kind, unmasked = kind_of(inner), cast(AllowedPairs, True)  # a literal would narrow the type to bool
        if kind == "from_function":
            function = cast(Callable[..., Any], inner.arguments["score_mod"])
            result = call_index_function("bias", function, (scores, *placed.indices), scores.elem_type)
            term = scores = _for_all_pairs(result, scores)
        elif kind in _LOWERED:
            term = _LOWERED[kind](placed, **inner.arguments).astype(scores.elem_type)
            scores = scores + term
        else:
            result, unmasked = biased_by_formula(inner, placed, scores)
            term = scores = _for_all_pairs(result.astype(scores.elem_type), scores)
        # Each bias is asked by itself: -inf + inf is NaN, which would no longer say that the pair is masked.
        if may_mask(bias):
            allowed = both_allow(both_allow(allowed, unmasked), ~xp.is_masked(term))
    if len(terms) > 1:
        # Two of the most negative finite numbers, which do not mask, add up to -inf, which would.
        least = float(np.finfo(scores.elem_type).min)
        scores = xp.where(xp.is_masked(scores), least, scores)
    return scores, allowed


def _placed(bias: Bias, tile: GraphTile) -> tuple[Bias, GraphTile]:
    """Return a bias of tokens that have positions of their own as the bias itself, and the tile with these."""
    if kind_of(bias) != "at_positions":
        return bias, tile
    positions = (bias.arguments[f"{token}_positions"] for token in ("query", "key"))
    return bias.parts[0], tile.at_positions(*positions)


def _for_all_pairs(result: GraphValue, scores: GraphValue) -> GraphValue:
    """result of a function -> Expand to the shape of the scores; the function may have ignored them."""
    if result.dims == scores.dims:
        return result
    return xp.broadcast_to(result, ops.shape_of(scores), dims=scores.dims)


def is_additive(bias: Bias) -> bool:
    """Return whether the bias is known to add a term that does not depend on the scores."""
    return all(map(is_additive, bias.parts)) if bias.parts else bias.only_adds


def _from_array(tile: GraphTile, array: Any) -> GraphValue:
    return tile.cut(tile.operand(array))


def _alibi(tile: GraphTile, slopes: object, offset: object) -> GraphValue:
    """-slope * |i + offset - j|, with slopes (..., Hq, 1, 1)."""
    graph, heads = tile.graph, tile.call.sizes.query_heads
    if isinstance(slopes, int):
        # A number of slopes stands for the library's own; it is asked for them by the bias at distance 1.
        check_columns(tile.graph.function, "bias.slopes", slopes, heads)
        ramp = biases.to_array(biases.alibi(slopes), (slopes, 1, 2))
        slopes = tuple(-ramp[:, 0, 1])
    if isinstance(slopes, Input | Initializer):
        values = tile.operand(slopes).astype(graph.float_dtype)
    else:
        values = graph.constant(slopes, graph.float_dtype)
    target = (*tile.call.sizes.batch, heads)
    check_broadcasts(tile.graph.function, "bias.slopes", as_lengths(values.dims), target, "(..., Hq)")
    values = ops.with_ones(values, 2)
    distance = abs(tile.query_index + tile.integers("bias.offset", offset) - tile.key_index)
    return -values * distance.astype(graph.float_dtype)


def _relative(
    tile: GraphTile, table: Any, bidirectional: bool, max_distance: int, offset: object
) -> GraphValue:
    """table (buckets, Hq) -> Gather by the bucket of each distance -> (Hq, rows, columns)."""
    count, heads = table.shape
    if isinstance(count, str):
        rule = "`bias.table` must have a number of buckets that is an int"
        raise ArgumentValueError(tile.graph.function, rule, {"table.shape": table.shape})
    check_columns(tile.graph.function, "bias.table", heads, tile.call.sizes.query_heads)
    distance = tile.key_index - (tile.query_index + tile.integers("bias.offset", offset))
    rules = Buckets(count, bidirectional, max_distance)
    by_bucket = tile.operand(table).astype(tile.graph.float_dtype)
    if max_distance <= LISTED:
        # The graph holds the bucket of each distance, so the table is reordered by distance once.
        every = tile.graph.constant(rules.of_each_distance(), "int64")
        by_bucket = xp.take(by_bucket, every, axis=0)
        index = xp.clip(distance, -max_distance, max_distance) + max_distance
    else:
        # A list of that many distances would be larger than a search among the beginnings of the buckets.
        index = bucket(rules, distance)
    term = xp.take(xp.matrix_transpose(by_bucket), index, axis=1)
    if index.ndim == 3:  # (Hq, 1, rows, columns)
        return xp.squeeze(term, 1)
    # If batch entries stand at different keys, (Hq, B, 1, rows, columns) becomes (B, Hq, rows, columns).
    return term if index.ndim == 2 else ops.squeeze_front(ops.swap(term, 0, 2), 4)


_LOWERED: dict[str, Callable[..., GraphValue]] = {
    # A formula gives the sum with the scores, of which only the term says whether it masks: two of the most
    # negative numbers add up to -inf. So its graph has 3 nodes more.
    "from_array": _from_array,
    "alibi": _alibi,  # its formula has a node more in a block of queries
    "relative": _relative,  # its formula asks for the lengths as numbers
}
"""The lowering of each bias that adds a term, by its name. Any other bias is traced from its own formula."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The rules by which `biases.relative` sorts distances into `count` buckets."""

    count: int
    bidirectional: bool
    max_distance: int

    @property
    def of_one_direction(self) -> int:
        """The number of buckets for earlier keys; later keys have as many, or share the first."""
        return self.count // 2 if self.bidirectional else self.count

    def first_distances(self) -> list[int]:
        """Return the smallest distance of each bucket of one direction except the first, in order."""
        distances: list[int] = cast(Any, self._bias(0)).first_distances  # an attribute of this bias alone
        return distances

    def of_each_distance(self) -> np.ndarray:
        """Return the bucket of each distance from -max_distance to max_distance."""
        bias, most = self._bias(self.max_distance), self.max_distance
        return np.asarray(biases.to_array(bias, (1, 1, 2 * most + 1))[0, 0], np.int64)

    def _bias(self, offset: int) -> Bias:
        """Return a bias of the library that adds the number of the bucket."""
        numbers = np.arange(float(self.count))[:, None]
        return biases.relative(
            numbers, bidirectional=self.bidirectional, max_distance=self.max_distance, offset=offset
        )


def bucket(rules: Buckets, distance: GraphValue) -> GraphValue:
    """Find the buckets of distances j - i by a binary search among the distances at which buckets begin.

    Each step is Gather -> LessOrEqual -> Where, for all distances at once, and there is one for each bit of the
    number of buckets. Nothing is rounded, as a logarithm would be.
    """
    graph, away = distance.graph, abs(distance)
    begins = [0, *rules.first_distances()]
    steps = range(len(begins).bit_length() - 1, -1, -1)
    never = [2**62] * (2 ** len(steps) - len(begins))
    listed = graph.constant([*begins, *never], "int64")
    number = distance * 0
    for step in steps:
        further = number + 2**step
        reached = xp.take(listed, further, axis=0) <= away
        number = xp.where(reached, further, number)
    if rules.bidirectional:
        return xp.where(distance > 0, number + rules.of_one_direction, number)
    return xp.where(distance > 0, 0, number)
