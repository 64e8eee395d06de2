"""Primitives in a Loop over blocks of queries: no more than a block of scores exists, with any mask."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from sdpa_xp_export._array_api import ops
from sdpa_xp_export._call.call import OUTPUTS, ExportCall
from sdpa_xp_export._call.mask_analysis import hides_whole_keys, is_only_causal
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._runtime.releases import Runtime
from sdpa_xp_export.forms.inputs import FormInputs, finished_outputs, read_inputs
from sdpa_xp_export.lowering import counting
from sdpa_xp_export.lowering.graph_lengths import GraphLengths
from sdpa_xp_export.lowering.hidden_keys import hide_keys
from sdpa_xp_export.lowering.key_range import key_range
from sdpa_xp_export.lowering.loop import count_down
from sdpa_xp_export.lowering.tile import GraphTile, KeyMask, TileRange
from sdpa_xp_export.lowering.tile_attention import attend_tile, scale_query

ROWS = 128
"""Queries in a block. A block meets all keys that it may attend at once, so its softmax is the plain one."""


def unsupported_reason(call: ExportCall, _runtime: Runtime) -> str | None:
    """Return why this form cannot state the call; None if it can."""
    if {"weights", "scores"} & set(call.outputs):
        return "weights and scores are L x S arrays, which its blocks avoid"
    return None


def write(graph: Graph, call: ExportCall, runtime: Runtime) -> dict[str, GraphValue]:
    """query, key, value -> Loop over blocks(Slice queries and keys -> attention) -> Reshape, Slice."""
    ranks = [spec.ndim for spec in (call.query, call.key, call.value)]
    inputs = read_inputs(graph, call, call.accumulation_dtype, max(3, *ranks))
    length = call.sizes.queries
    queries = ops.unsqueeze(inputs.lengths.queries, 0)
    if isinstance(length, int):
        sizes = min(length, ROWS), -(-length // ROWS)
        rows, count = (graph.constant([size], "int64") for size in sizes)
        even = length % sizes[0] == 0
    else:
        # Without a query there is one block of one row: with no row the count would be divided by 0, which
        # ends the process on old releases.
        rows = counting.within(queries, 1, ROWS)
        count, even = counting.larger(counting.divided(queries + (rows - 1), rows), 1), False
    key, value, columns, key_mask = hide_keys(inputs.lengths, inputs.key, inputs.value)
    inputs = replace(inputs, key=key, value=value)
    names = [name for name in OUTPUTS if name in call.outputs]

    def step(body: Graph, number: GraphValue) -> list[GraphValue]:
        tile = _block_of_step(body, number, inputs.lengths, rows, columns, key_mask)
        # A Softmax that hides NaN would hide it in a row that attends it, too.
        results = _attend_block(tile, inputs, even=even, explicit_softmax=runtime.softmax_hides_nan)
        return [results[name] for name in names]

    # Under the diagonal, the last block has the most keys: what it takes is enough for all that follow.
    blocks = count_down(graph, count, step)
    bounds = None if even else (graph.constant([0], "int64"), queries)
    joined = {
        name: _joined(inputs, stacked, count, rows, bounds) for name, stacked in zip(names, blocks, strict=True)
    }
    return finished_outputs(inputs, joined)


def _block_of_step(
    body: Graph,
    number: GraphValue,
    lengths: GraphLengths,
    rows: GraphValue,
    columns: TileRange,
    key_mask: KeyMask | None,
) -> _QueryBlock:
    """The number of a step -> its block of queries, and the keys that are left of all."""
    first = ops.unsqueeze(number, 0) * body.here(rows)
    queries = TileRange("queries", "rows", first, first + body.here(rows))
    if columns.start is not None and columns.stop is not None:
        columns = replace(columns, start=body.here(columns.start), stop=body.here(columns.stop))
    if key_mask is not None:
        key_mask = KeyMask(body.here(key_mask.allowed), body.here(key_mask.added))
    return _QueryBlock(lengths, body, queries, columns, key_mask)


def _attend_block(
    tile: _QueryBlock, inputs: FormInputs, *, even: bool, explicit_softmax: bool
) -> dict[str, GraphValue]:
    """A block of queries -> attention over the keys that the block may attend."""
    body, first, stop = tile.graph, tile.row_range.start, tile.row_range.stop
    assert first is not None
    assert stop is not None
    # A block is cut and scaled here, because copies of all queries would take more memory.
    real = GraphTile(tile.lengths, body, tile.row_range, tile.column_range)
    query = scale_query(real, real.cut_queries(body.here(inputs.query)))
    if not even:
        query = _padded(query, counting.larger(stop - 1 - tile.last, 0))
    body.declare(query)
    key, value = body.here(inputs.key), body.here(inputs.value)
    keys = key_range(tile, first, counting.smaller(stop - 1, tile.last))
    if keys is not None:
        tile.column_range = TileRange("keys", "columns", *keys)
        key, value = (ops.cut(array, keys, -2, "columns") for array in (key, value))
        if tile.key_mask is not None:
            tile.key_mask = KeyMask(tile.cut(tile.key_mask.allowed), tile.cut(tile.key_mask.added))
    return attend_tile(tile, query, key, value, explicit_softmax=explicit_softmax)


def _padded(query: GraphValue, missing: GraphValue) -> GraphValue:
    """(..., real, E) -> (..., rows, E), with rows of 0 behind the last query."""
    graph = query.graph
    before, behind = (graph.constant([0] * length, "int64") for length in (2 * query.ndim - 2, 1))
    shape = (*query.dims[:-2], "rows", query.dims[-1])
    pads = ops.join([before, missing, behind])
    return graph.add("Pad", query, pads, dtype=query.elem_type, shape=shape)


class _QueryBlock(GraphTile):
    """A block of queries, which may go beyond the last one."""

    def __init__(
        self,
        lengths: GraphLengths,
        graph: Graph,
        rows: TileRange,
        columns: TileRange,
        key_mask: KeyMask | None,
    ) -> None:
        masks = lengths.call.masks
        if key_mask is not None:
            masks = tuple(mask for mask in masks if not hides_whole_keys(mask))
        super().__init__(lengths, graph, rows, columns, masks)
        self.key_mask = key_mask
        # The padding rows of the last block count as the last query: each index that masks ask for exists.
        self.last = ops.unsqueeze(graph.here(lengths.queries), 0) - 1

    @property
    def hides_keys(self) -> bool:
        """Whether keys outside `key_mask` exist that no query of the block may attend to."""
        if self.key_mask is None:
            return super().hides_keys
        # Under the diagonal alone, the block's last query attends each key of its range, so none is hidden.
        return bool(self.masks) and not is_only_causal(self.masks, self.call.biases)

    @cached_property
    def rows(self) -> GraphValue:
        return counting.smaller(self._numbers(self.row_range), self.last)

    def cut(self, value: GraphValue) -> GraphValue:
        # A Slice would end at the last query; Gather repeats its row for the padding.
        rows = self.rows if value.ndim > 1 and value.dims[-2] != 1 else None
        value = value if rows is None else ops.gather(value, rows, value.ndim - 2)
        return self._cut(value, -1, self.column_range)


def _joined(
    inputs: FormInputs,
    blocks: GraphValue,
    count: GraphValue,
    rows: GraphValue,
    bounds: tuple[GraphValue, GraphValue] | None,
) -> GraphValue:
    """(blocks, ..., rows, ...), the last block first -> (..., L, ...), without the padding behind L."""
    graph, axis = blocks.graph, inputs.query.ndim - 1
    before, rest = blocks.dims[1:axis], blocks.dims[axis + 1 :]
    # The standard stacks what a loop returns. ONNX's evaluator joins it, but the numbers have the same order.
    outer, inner = ([inputs.lengths.length(length) for length in lengths] for lengths in (before, rest))
    blocks = ops.reshape_to(blocks, ops.join([count, *outer, rows, *inner]), blocks.dims)
    blocks = ops.permute(ops.reverse(blocks), [*range(1, axis), 0, *range(axis, blocks.ndim)])
    length = inputs.call.sizes.queries
    target = graph.constant([*[0] * len(before), -1, *rest], "int64")
    joined = ops.reshape_to(blocks, target, (*before, length if bounds is None else "padded", *rest))
    return joined if bounds is None else ops.cut(joined, bounds, axis - 1 - joined.ndim, length)
