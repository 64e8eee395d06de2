"""Sums over the queries of a call, to which each step of a loop adds those of its queries."""

from __future__ import annotations

from dataclasses import dataclass

from sdpa_xp_export import _arrays as xp
from sdpa_xp_export._arrays import ops
from sdpa_xp_export._call.arguments import SUMS_OF_QUERIES
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.lowering.graph_lengths import GraphLengths
from sdpa_xp_export.lowering.statistics import in_blocks_of_keys
from sdpa_xp_export.lowering.tile import GraphTile


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
            dims = (*before, "query_blocks", "key_blocks")
        target = xp.concat([*(lengths.length(length) for length in before), rows, columns])
        start: GraphValue = xp.broadcast_to(zero, target, dims=dims)
        return start

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
        return ops.cut(total, bounds, -2, "query_blocks")

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
    count: GraphValue = xp.floor_divide(length + (size - 1), size, exact=False)
    return count
