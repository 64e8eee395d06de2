"""Statistics of a tile's scores and weights, as the library's `attention_statistics` defines them.

Sums over queries are products with a matrix of 0 and 1, which also leaves out rows that are no queries. Each
step of a loop adds those of its queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdpa_xp.errors import ArgumentValueError

from .. import _arrays as xp
from .._arrays import ops
from .._call.call import ExportCall
from .._call.outputs import SUMS_OF_QUERIES
from .._graph import GraphValue, has_names
from .._runtime.releases import Runtime
from .tile import GraphLengths, GraphTile

LEAST_DIFFERENCE = -1000.0
"""exp of less is 0 in float64 too. -inf would not do, because 0 * -inf is NaN."""


def row_max(scores: GraphValue, runtime: Runtime) -> GraphValue:
    """scores (..., rows, columns) -> the largest of each row, (..., rows, 1); NaN if one is NaN."""
    largest: GraphValue = xp.max(scores, axis=-1, keepdims=True)
    if not runtime.max_loses_infinity:
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
    if graph.settings.for_openvino:
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


OF_WEIGHTS = {"key_sums": key_sums, "block_sums": block_sums}
"""The rows of each sum over queries, by the name of the sum."""


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
