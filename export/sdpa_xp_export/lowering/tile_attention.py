"""Attention of a tile in the operators of ai.onnx, used by every form without a fused kernel.

Statistics of its scores and weights are as the library's `attention_statistics` defines them. Sums over queries
are products with a matrix of 0 and 1, which also leaves out rows that are no queries. Each step of a loop adds
those of its queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdpa_xp._checks.arrays import HLE
from sdpa_xp.errors import ArgumentValueError

from .. import _arrays as xp
from .._arrays import ops
from .._call.call import ExportCall
from .._call.mask_analysis import has_empty_rows, is_only_causal
from .._call.operands import SUMS_OF_QUERIES, Initializer, Input
from .._graph import GraphValue, has_names
from .formula import AllowedPairs, all_allowed, biased, both_allow
from .tile import GraphLengths, GraphTile

EXPLICIT = {"lse", "row_max", "entropy", "top_weights", "top_indices", *SUMS_OF_QUERIES}
"""What a Softmax does not return; the largest score must not lose a NaN to what is added to hide a pair."""
LEAST_DIFFERENCE = -1000.0
"""exp of less is 0 in float64 too. -inf would not do, because 0 * -inf is NaN."""


def scale_query(tile: GraphTile, query: GraphValue) -> GraphValue:
    """query of the tile -> query * scale, also divided by the softcap, whose Tanh takes scores / softcap."""
    call = tile.call
    if isinstance(call.scale, Input | Initializer):
        query = query * tile.cut(tile.operand(call.scale)).astype(query.elem_type)
        return query if call.softcap is None else query / call.softcap
    return query * (call.scale / (call.softcap or 1.0))


def attend_tile(
    tile: GraphTile, query: GraphValue, key: GraphValue, value: GraphValue
) -> dict[str, GraphValue]:
    """query from `scale_query`, key, value -> the outputs of the call and others, by name.

    Exponentials and their sum are written instead of a Softmax where that has no room for sinks, returns no
    log-sum-exp, or hides NaN, which would hide it in a row that attends it, too.
    """
    call, runtime = tile.call, tile.graph.runtime
    explicit_softmax = (
        runtime.may_meet("softmax of NaN") or call.sinks is not None or not EXPLICIT.isdisjoint(call.outputs)
    )
    if runtime.may_meet("exp of NaN"):  # in its Softmax, too, if that is not one kernel with the products
        explicit_softmax = explicit_softmax or call.outputs != ("output",)
    # A query that is inf or NaN makes the scores of masked keys NaN. A Softmax node returns NaN for its row in
    # any case, unless the row has no key; but a soft cap and an explicit softmax may return numbers.
    may_add = not explicit_softmax and call.softcap is None
    scores, allowed = masked_scores(tile, query, key, may_add=may_add)
    # Weights and scores have the whole batch, of which the values alone may have an axis.
    scores = scores if call.outputs == ("output",) else _expand_to_batch(tile, scores)
    results = {"scores": scores}
    if explicit_softmax:
        weights, of_rows = _explicit_softmax(tile, scores)
        results |= of_rows
    else:
        weights = scores.graph.add("Softmax", scores, dtype=scores.elem_type, shape=scores.dims, axis=-1)
    results["weights"] = weights
    if call.sums_queries:
        results |= sums_of_weights(tile, weights)
    if isinstance(allowed, GraphValue) and tile.hides_keys:
        # The weight of a masked pair is 0, but 0 * NaN is NaN: what no query attends becomes 0 first.
        value = xp.where(is_attended(allowed, call.sizes.heads), value, 0.0)
    results["output"] = matmul_grouped(weights, value, tile.folds)
    if not explicit_softmax and isinstance(allowed, GraphValue) and has_empty_rows(call):
        # Softmax returns NaN for a row without a key. The explicit softmax divides by 1 there, and returns 0.
        attends = has_allowed_key(allowed)
        results |= {name: xp.where(attends, results[name], 0.0) for name in call.outputs if name != "scores"}
    return results


def masked_scores(
    tile: GraphTile, query: GraphValue, key: GraphValue, *, may_add: bool = True
) -> tuple[GraphValue, AllowedPairs]:
    """query, key -> query @ key^T -> Tanh, Mul softcap -> biases -> Where(may attend, scores, -inf).

    With `may_add`, the -inf of a `key_mask` is added, which is faster than a Where but leaves NaN what is NaN.
    """
    call = tile.call
    scores = matmul_grouped(query, xp.matrix_transpose(key), tile.folds)
    if call.softcap is not None:
        scores = xp.tanh(scores) * call.softcap
    scores, allowed = biased(tile, scores, all_allowed(tile, tile.masks))
    if tile.key_mask is not None and not may_add:
        allowed = both_allow(allowed, tile.key_mask.allowed)
        assert isinstance(allowed, GraphValue)
        return xp.where(allowed, scores, -math.inf), allowed
    hidden = None if tile.key_mask is None else tile.key_mask.added
    if isinstance(allowed, GraphValue):
        if tile.hides_keys or not is_only_causal(tile.masks, call.biases):
            scores = xp.where(allowed, scores, -math.inf)
        else:
            # Some query attends each key that is left, so -inf may be added: one small array serves all heads.
            masked = xp.where(allowed, tile.graph.constant(0.0, scores.elem_type), -math.inf)
            hidden = masked if hidden is None else masked + hidden
    if tile.key_mask is not None:
        allowed = both_allow(allowed, tile.key_mask.allowed)
    return (scores if hidden is None else scores + hidden), allowed


def _expand_to_batch(tile: GraphTile, scores: GraphValue) -> GraphValue:
    """scores -> Expand to the whole batch."""
    batch = tile.call.sizes.batch
    if scores.dims[:-3] == batch:
        return scores
    lengths = tile.whole.lengths
    ones = [lengths.graph.constant([1], "int64")] * 3
    target = tile.here(xp.concat([*(lengths.length(length) for length in batch), *ones]))
    return xp.broadcast_to(scores, target, dims=(*batch, *scores.dims[-3:]))


def _explicit_softmax(tile: GraphTile, scores: GraphValue) -> tuple[GraphValue, dict[str, GraphValue]]:
    """scores -> exp(s - m) / l, and what a call may ask for of each row.

    The log-sum-exp is m + log(l); sinks count in m and in l, but not in the largest score.
    """
    call = tile.call
    asks = "row_max" in call.outputs
    m = row_max(scores) if asks else ops.reduce("ReduceMax", scores)
    of_rows, sinks = {"row_max": m}, None
    if call.sinks is not None:
        sinks = ops.with_ones(tile.operand(call.sinks).astype(scores.elem_type), 2)
        m = xp.maximum(m, sinks)
    shift = xp.where(xp.is_masked(m), 0.0, m)  # -inf - -inf would be NaN
    difference = scores - shift
    p = xp.exp(difference)
    if tile.graph.runtime.may_meet("exp of NaN"):
        p = xp.where(xp.isnan(scores), scores, p)
    l = of_keys = ops.reduce("ReduceSum", p)
    if sinks is not None:
        l = l + xp.exp(sinks - shift)
    empty = l <= 0.0  # all scores of the row are -inf, and so is its sink if there is one
    l = xp.where(empty, 1.0, l)
    # -inf is written for empty rows: WebGPU leaves log(0) open, and a software adapter returns -88.
    of_rows["lse"] = xp.where(empty, -math.inf, xp.log(l) + shift)
    of_rows["entropy"] = entropy(p, difference, of_keys, l)
    of_rows = {name: _without_last_axis(value) for name, value in of_rows.items()}
    if call.top_k:
        of_rows["top_weights"], of_rows["top_indices"] = top_keys(tile, scores, shift, l)
    return p / l, of_rows


def _without_last_axis(value: GraphValue) -> GraphValue:
    axis = value.graph.constant([-1], "int64")
    return value.graph.add("Squeeze", value, axis, dtype=value.elem_type, shape=value.dims[:-1])


def in_layout(value: GraphValue, layout: str) -> GraphValue:
    """(..., heads, length, width) -> the axes in the order of `layout`, and back; 2-D has no heads."""
    return value if layout == HLE or value.ndim < 3 else xp.moveaxis(value, -2, -3)


def matmul_grouped(
    rows: GraphValue, shared: GraphValue, folds: tuple[GraphValue, GraphValue] | None
) -> GraphValue:
    """rows (..., Hq, L, X), shared (..., H, X, Y) -> (..., Hq, L, Y); head h meets shared head h // G.

    The G = Hq // H heads of a group become rows of one product, so `shared` is never repeated:
    Reshape -> MatMul -> Reshape. With Hq = H it is a MatMul alone. `folds` has the shapes of the two Reshapes,
    (..., H, -1, X) and (..., Hq, -1, Y), if only a run says H.
    """
    heads, groups = rows.dims[-3], shared.dims[-3]
    batch = rows.graph.joint_shape(rows.dims[:-3], shared.dims[:-3])
    shape = (*batch, heads, rows.dims[-2], shared.dims[-1])
    if heads == groups:
        return rows @ shared
    folded = (*rows.dims[:-3], groups, "folded rows", rows.dims[-1])
    to_groups, to_heads = folds or (
        [*[0] * len(before), count, -1, 0] for before, count in ((rows.dims[:-3], groups), (batch, heads))
    )
    return xp.reshape(xp.reshape(rows, to_groups, dims=folded) @ shared, to_heads, dims=shape)


def has_allowed_key(allowed: GraphValue) -> GraphValue:
    """allowed (..., Hq, L, S), any axis of which may be 1 -> boolean (..., Hq, L, 1): may it attend a key.

    Cast -> MatMul with a column of ones -> Greater 0.
    """
    flags = ops.to_rank(allowed, 2).astype("float32")
    shape = (*flags.dims[:-1], 1)
    return allowed.graph.add("MatMul", flags, ops.ones_column(flags), dtype="float32", shape=shape) > 0.0


def is_attended(allowed: GraphValue, groups: int) -> GraphValue:
    """allowed (..., Hq, L, S), any axis of which may be 1 -> boolean (..., H, S, 1): may a query attend it.

    Cast -> ReduceSum over L -> ReduceSum over the heads of a group -> Transpose -> Greater 0.
    """
    count = ops.reduce("ReduceSum", ops.to_rank(allowed, 2).astype("float32"), -2)
    heads = count.dims[-3] if count.ndim >= 3 else 1
    if isinstance(heads, int) and heads not in (1, groups):
        target = [0] * (count.ndim - 3) + [groups, heads // groups, -1]
        count = xp.reshape(count, target, dims=(*count.dims[:-3], groups, heads // groups, count.dims[-1]))
        count = ops.reduce("ReduceSum", count, -2)
    return xp.matrix_transpose(count) > 0.0


def row_max(scores: GraphValue) -> GraphValue:
    """scores (..., rows, columns) -> the largest of each row, (..., rows, 1); NaN if one is NaN."""
    largest: GraphValue = xp.max(scores, axis=-1, keepdims=True)
    if not scores.graph.runtime.may_meet("maximum of -inf"):
        return largest
    is_key = xp.where(xp.is_masked(scores), scores.graph.constant(0.0, scores.elem_type), 1.0)
    return xp.where(ops.reduce("ReduceMax", is_key) > 0.0, largest, -math.inf)


def entropy(p: GraphValue, difference: GraphValue, of_keys: GraphValue, l: GraphValue) -> GraphValue:
    """p = exp(difference), its sum over the keys, l with the sinks -> -sum(w log w), where w = p / l.

    It is of_keys / l log(l) - sum(p difference) / l. Both terms are at least 0, so no digits cancel.
    """
    finite = xp.where(difference < LEAST_DIFFERENCE, LEAST_DIFFERENCE, difference)
    weighted = ops.reduce("ReduceSum", p * finite)
    return of_keys / l * xp.log(l) - weighted / l


def top_keys(
    tile: GraphTile, scores: GraphValue, shift: GraphValue, l: GraphValue
) -> tuple[GraphValue, GraphValue]:
    """scores (..., rows, columns) -> the `top_k` largest weights and their keys, (..., rows, top_k).

    TopK of the scores s -> exp(s - shift) / l -> Pad. A weight may be 0 where its score is not -inf.
    """
    graph, wanted, axis = scores.graph, tile.call.top_k, scores.ndim - 1
    if graph.runtime.is_openvino:
        rule = (
            "a graph for openvino must have no top_keys, since OpenVINO leaves the order of equal weights open"
        )
        raise ArgumentValueError(graph.function, rule, {"top_k": wanted}, "Export for onnxruntime.")
    columns, before = scores.dims[-1], scores.dims[:-1]
    is_enough = isinstance(columns, int) and columns >= wanted
    count = graph.constant([wanted], "int64")
    if not is_enough:
        count = xp.minimum(ops.length_of(scores, axis), count, exact=False)
    if has_names(before):  # onnxruntime 1.23 ends the process if it takes elements of no rows
        size = graph.add("Size", scores, dtype="int64", shape=())
        count = count * xp.minimum(size, 1, exact=False)
    shape = (*before, wanted if is_enough else "found")
    best, keys = graph.add_many("TopK", scores, count, outputs=[(scores.elem_type, shape), ("int64", shape)])
    weights = xp.exp(best - shift) / l
    keys = keys if tile.column_range.bounds is None else keys + tile.column_range.bounds[0]
    keys = xp.where(xp.is_masked(best), -1, keys)
    if not is_enough:
        missing = graph.constant([wanted], "int64") - count
        pads = xp.concat([graph.constant([0] * (2 * axis + 1), "int64"), missing])
        weights, keys = (
            graph.add(
                "Pad", x, pads, graph.constant(fill, x.elem_type), dtype=x.elem_type, shape=(*before, wanted)
            )
            for x, fill in ((weights, 0.0), (keys, -1))
        )
    is_nan = xp.isnan(l)  # of a row with a NaN nothing is known
    return xp.where(is_nan, math.nan, weights), xp.where(is_nan, -1, keys)


def key_sums(tile: GraphTile) -> GraphValue:
    """Return which rows are queries, (1, rows): the sum over the queries is a product with it."""
    return xp.expand_dims(tile.row_numbers >= 0, axis=0)


def block_sums(tile: GraphTile) -> GraphValue:
    """Return which rows are in each block of queries that the tile meets, (blocks of the tile, rows)."""
    assert tile.call.block_size is not None
    size = tile.call.block_size[0]
    first, count = tile.blocks_of_queries(size)
    block = xp.floor_divide(tile.row_numbers, size) - first  # negative before the first query
    numbers = xp.arange(0, count, length="query blocks")
    return xp.expand_dims(numbers, axis=1) == xp.expand_dims(block, axis=0)


OF_WEIGHTS = {"key_sums": key_sums, "block_sums": block_sums}
"""The rows of each sum over queries, by the name of the sum."""


def sums_of_weights(tile: GraphTile, weights: GraphValue) -> dict[str, GraphValue]:
    """weights (..., rows, columns) -> the sums over queries that the call asks for, (..., sums, columns).

    A row with NaN is left out of the product, since 0 * NaN is NaN, and shows in the sums that it is part of.
    """
    dtype, sums = weights.elem_type, {}
    is_nan = xp.isnan(ops.reduce("ReduceSum", weights))
    others = xp.where(is_nan, 0.0, weights)
    for name, rows_of in OF_WEIGHTS.items():
        if name in tile.call.outputs:
            part = rows_of(tile).astype(dtype)
            sums[name] = xp.where(part @ is_nan.astype(dtype) > 0.0, math.nan, part @ others)
    return sums


def in_blocks_of_keys(strip: GraphValue, size: int, first: GraphValue, behind: GraphValue) -> GraphValue:
    """strip (..., M, columns), how many keys come before it and how many follow -> (..., M, blocks of keys).

    Pad to whole blocks of keys -> Reshape -> ReduceSum.
    """
    graph, none = strip.graph, strip.graph.constant([0] * (strip.ndim - 1), "int64")
    pads = xp.concat([none, first, none, behind])
    padded = graph.add("Pad", strip, pads, dtype=strip.elem_type, shape=(*strip.dims[:-1], "whole blocks"))
    target = graph.constant([*[0] * (strip.ndim - 1), -1, size], "int64")
    blocks = xp.reshape(padded, target, dims=(*strip.dims[:-1], "key blocks", size))
    return xp.squeeze(ops.reduce("ReduceSum", blocks), axis=-1)


@dataclass(frozen=True, slots=True)
class SumOverQueries:
    """An output (..., Hq, M, N): a row for each block of queries, and a column for each block of keys."""

    name: str
    call: ExportCall
    size: tuple[int, int] | None
    """The queries and keys of a block; None is all queries, and one key."""

    def start(self, lengths: GraphLengths, most_blocks: int) -> GraphValue:
        """Return 0 for all blocks, with room behind them, where a step of `most_blocks` blocks may end."""
        sizes, graph = self.call.sizes, lengths.graph
        zero, one = graph.constant([0.0], self.call.accumulation_dtype), graph.constant([1], "int64")
        before = (*sizes.batch, sizes.query_heads)
        rows, columns = one, lengths.length(sizes.keys)
        dims: tuple[int | str, ...] = (*before, 1, sizes.keys)
        if self.size is not None:
            rows = _blocks(lengths.length(sizes.queries), self.size[0]) + most_blocks
            columns = _blocks(columns, self.size[1])
            dims = (*before, "query blocks", "key blocks")
        target = xp.concat([*(lengths.length(length) for length in before), rows, columns])
        return xp.broadcast_to(zero, target, dims=dims)

    def added(self, tile: GraphTile, total: GraphValue, of_tile: GraphValue) -> GraphValue:
        """Return the total with the sums of a tile, (..., its blocks of queries, its columns)."""
        graph, zero = tile.graph, tile.graph.constant([0], "int64")
        sizes, none = self.call.sizes, graph.constant([0] * (of_tile.ndim - 2), "int64")
        first, stop = tile.column_range.bounds or (zero, tile.host.key_count)
        keys, dtype = tile.host.length(sizes.keys), of_tile.elem_type
        if self.size is None:
            pads = xp.concat([none, zero, first, none, zero, keys - stop])
            return total + graph.add("Pad", of_tile, pads, dtype=dtype, shape=total.dims)
        in_blocks = in_blocks_of_keys(
            of_tile, self.size[1], first, _blocks(keys, self.size[1]) * self.size[1] - stop
        )
        first_block = xp.expand_dims(tile.blocks_of_queries(self.size[0])[0], axis=0)
        behind = _blocks(tile.host.length(sizes.queries), self.size[0]) - first_block
        pads = xp.concat([none, first_block, zero, none, behind, zero])
        return total + graph.add("Pad", in_blocks, pads, dtype=dtype, shape=total.dims)

    def finished(self, lengths: GraphLengths, total: GraphValue) -> GraphValue:
        """Return the output from the total of all steps."""
        if self.size is None:
            return xp.squeeze(total, axis=-2)
        blocks = _blocks(lengths.length(self.call.sizes.queries), self.size[0])
        bounds = lengths.graph.constant([0], "int64"), blocks
        return ops.cut(total, bounds, -2, "query blocks")

    def of_whole(self, tile: GraphTile, sums: GraphValue) -> GraphValue:
        """Return the output from the sums of a tile of all pairs."""
        if self.size is None:
            return xp.squeeze(sums, axis=-2)
        size, keys = self.size[1], tile.host.length(self.call.sizes.keys)
        return in_blocks_of_keys(
            sums, size, tile.graph.constant([0], "int64"), _blocks(keys, size) * size - keys
        )


def sums_of(call: ExportCall) -> list[SumOverQueries]:
    """Return the outputs of a call that are sums over queries."""
    sizes = {"key_sums": None, "block_sums": call.block_size}
    return [SumOverQueries(name, call, sizes[name]) for name in SUMS_OF_QUERIES if name in call.outputs]


def most_blocks(call: ExportCall, rows: int) -> int:
    """Return how many blocks of queries so many rows may meet, of which the first one begins anywhere."""
    return 1 if call.block_size is None else (rows - 2) // call.block_size[0] + 2


def _blocks(length: GraphValue, size: int) -> GraphValue:
    """(1,) -> how many blocks of a size cover it, (1,)."""
    return xp.floor_divide(length + (size - 1), size, exact=False)
