"""Each bias of the library as what it adds to the scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from sdpa_xp import biases
from sdpa_xp._checks.score_arrays import check_columns
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentValueError

from .. import _arrays as xp
from .._arrays import ops
from .._call.mask_analysis import may_mask
from .._call.operands import kind_of
from .._graph.graph import GraphValue
from .formula import FormulaGrid, biased_by_formula, call_index_function
from .masks import AllowedPairs, both_allow
from .tile import GraphTile

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
            scores = _for_all_pairs(result, scores)
        elif kind == "relative":  # its formula asks for the lengths as numbers
            term = _relative(placed, inner).astype(scores.elem_type)
            scores, unmasked = scores + term, ~xp.is_masked(term)
        else:
            result, unmasked = biased_by_formula(inner, placed, scores)
            result = result.astype(scores.elem_type)
            scores = result if inner.only_adds else _for_all_pairs(result, scores)
        # Each bias says by itself what it masks: -inf + inf is NaN, which would no longer say so. A function of
        # the caller says it by its result alone.
        if may_mask(bias):
            allowed = both_allow(allowed, unmasked)
            if kind in ("", "from_function"):
                allowed = both_allow(allowed, ~xp.is_masked(scores))
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


def _relative(tile: GraphTile, bias: Any) -> GraphValue:
    """table (buckets, Hq) -> Gather by the bucket of each distance -> (Hq, rows, columns)."""
    count, heads = bias.table.shape
    if isinstance(count, str):
        rule = "`bias.table` must have a number of buckets that is an int"
        raise ArgumentValueError(tile.graph.function, rule, {"table.shape": bias.table.shape})
    by_bucket, furthest = tile.operand(bias.table), bias.max_distance
    FormulaGrid(tile).check_dtype("bias.table", by_bucket)
    check_columns(tile.graph.function, "bias.table", heads, tile.call.sizes.query_heads)
    distance = tile.key_index - (tile.query_index + tile.integers("bias.offset", bias.offset))
    by_bucket = by_bucket.astype(tile.graph.float_dtype)
    if furthest <= LISTED:
        # The graph holds the bucket of each distance, so the table is reordered by distance once.
        every = tile.graph.constant(buckets(bias), "int64")
        by_bucket = xp.take(by_bucket, every, axis=0)
        index = xp.clip(distance, -furthest, furthest) + furthest
    else:
        # A list of that many distances would be larger than a search among the beginnings of the buckets.
        index = bucket(bias, distance)
    term = xp.take(xp.matrix_transpose(by_bucket), index, axis=1)
    if index.ndim == 3:  # (Hq, 1, rows, columns)
        return xp.squeeze(term, 1)
    # If batch entries stand at different keys, (Hq, B, 1, rows, columns) becomes (B, Hq, rows, columns).
    return term if index.ndim == 2 else ops.squeeze_front(ops.swap(term, 0, 2), 4)


def buckets(bias: Any) -> np.ndarray:
    """Return the bucket of each distance from -max_distance to max_distance, of `biases.relative`."""
    most, numbers = bias.max_distance, np.arange(float(bias.table.shape[0]))[:, None]
    numbered = replace(bias, table=numbers, offset=most)
    return np.asarray(biases.to_array(numbered, (1, 1, 2 * most + 1))[0, 0], np.int64)


def bucket(bias: Any, distance: GraphValue) -> GraphValue:
    """Find the buckets of distances j - i by a binary search among the distances at which they begin.

    Each step is Gather -> LessOrEqual -> Where, for all distances at once, and there is one for each bit of the
    number of buckets. Nothing is rounded, as a logarithm would be.
    """
    graph, away = distance.graph, abs(distance)
    begins = [0, *bias.first_distances]
    steps = range(len(begins).bit_length() - 1, -1, -1)
    never = [2**62] * (2 ** len(steps) - len(begins))
    listed = graph.constant([*begins, *never], "int64")
    number = distance * 0
    for step in steps:
        further = number + 2**step
        reached = xp.take(listed, further, axis=0) <= away
        number = xp.where(reached, further, number)
    if bias.bidirectional:
        return xp.where(distance > 0, number + bias.table.shape[0] // 2, number)
    return xp.where(distance > 0, 0, number)
