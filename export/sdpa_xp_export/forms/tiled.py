"""Primitives in a Scan over blocks of queries: no more than a block of scores exists, with any mask."""

from __future__ import annotations

from functools import cached_property

from sdpa_xp_export._array_api import ops
from sdpa_xp_export._call.call import OUTPUTS, ExportCall
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._runtime.releases import Runtime
from sdpa_xp_export.forms.inputs import FormInputs, finished_outputs, read_inputs
from sdpa_xp_export.lowering import counting
from sdpa_xp_export.lowering.graph_lengths import GraphLengths
from sdpa_xp_export.lowering.key_range import key_range
from sdpa_xp_export.lowering.tile import GraphTile, TileRange, whole_tile
from sdpa_xp_export.lowering.tile_attention import attend_tile, scale_query
from sdpa_xp_export.spec import SymbolicShape

ROWS = 128
"""Queries in a block. A block meets all keys that it may attend at once, so its softmax is the plain one."""


def unsupported_reason(call: ExportCall, _runtime: Runtime) -> str | None:
    """Return why this form cannot state the call; None if it can."""
    if {"weights", "scores"} & set(call.outputs):
        return "weights and scores are as large as what the blocks are to avoid"
    return None


def write(graph: Graph, call: ExportCall, runtime: Runtime) -> dict[str, GraphValue]:
    """query -> Pad, Reshape to blocks -> Scan(Slice keys -> attention of the block) -> Reshape, Slice."""
    ranks = [spec.ndim for spec in (call.query, call.key, call.value)]
    inputs = read_inputs(graph, call, call.accumulation_dtype, max(3, *ranks))
    query = scale_query(whole_tile(inputs.lengths, inputs.key), inputs.query)
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
    blocks = _in_blocks(query if even else _padded(query, queries, rows, count), rows, count)
    steps = ops.arange(ops.scalar(count), "blocks")
    body = graph.loop_body()
    # A Softmax that hides NaN would hide it in a row that attends it, too.
    results = _attend_block(body, inputs, blocks, rows, explicit_softmax=runtime.softmax_hides_nan)
    axis = query.ndim - 2
    names = [name for name in OUTPUTS if name in call.outputs]
    scanned = graph.add_many(
        "Scan",
        blocks,
        steps,
        outputs=[(results[name].dtype, _stacked(results[name].shape, axis)) for name in names],
        body=body.subgraph([results[name] for name in names]),
        num_scan_inputs=2,
        scan_input_axes=[axis, 0],
        scan_output_axes=[axis] * len(names),
    )
    joined = {
        name: _joined(value, axis, length, None if even else queries)
        for name, value in zip(names, scanned, strict=True)
    }
    return finished_outputs(inputs, joined)


def _padded(query: GraphValue, queries: GraphValue, rows: GraphValue, count: GraphValue) -> GraphValue:
    """(..., L, E) -> as many rows as the blocks have; the rows behind the last query are 0."""
    graph = query.graph
    before, behind = (graph.constant([0] * length, "int64") for length in (2 * query.ndim - 2, 1))
    pads = ops.join([before, count * rows - queries, behind])
    shape = (*query.shape[:-2], "padded", query.shape[-1])
    return graph.add("Pad", query, pads, dtype=query.dtype, shape=shape)


def _in_blocks(query: GraphValue, rows: GraphValue, count: GraphValue) -> GraphValue:
    """(..., blocks * rows, E) -> (..., blocks, rows, E)."""
    graph, width = query.graph, query.shape[-1]
    kept = graph.constant([0] * (query.ndim - 2), "int64")  # in the target of Reshape, 0 keeps a length
    target = ops.join([kept, count, rows, graph.constant([width], "int64")])
    return ops.reshape_to(query, target, (*query.shape[:-2], "blocks", "rows", width))


def _attend_block(
    body: Graph, inputs: FormInputs, blocks: GraphValue, rows: GraphValue, *, explicit_softmax: bool
) -> dict[str, GraphValue]:
    """One block of queries and its number -> attention over the keys that the block may attend."""
    lengths = inputs.lengths
    query = body.input("block", blocks.dtype, (*blocks.shape[:-3], *blocks.shape[-2:]))
    step = ops.unsqueeze(body.input("step", "int64", ()), 0)
    # The padding rows of the last block count as the last query: each index that masks ask for exists.
    last = ops.unsqueeze(body.here(lengths.queries), 0) - 1
    first = step * body.here(rows)
    stop = first + body.here(rows)
    row_range, column_range = (
        TileRange("queries", "rows", first, stop),
        TileRange("keys", inputs.key.shape[-2]),
    )
    tile = _QueryBlock(lengths, body, row_range, column_range, last)
    keys = key_range(tile, first, counting.smaller(stop - 1, last))
    key, value = body.here(inputs.key), body.here(inputs.value)
    if keys is not None:
        tile.column_range = TileRange("keys", "columns", *keys)
        key, value = (ops.cut(array, keys, -2, "columns") for array in (key, value))
    return attend_tile(tile, query, key, value, explicit_softmax=explicit_softmax)


class _QueryBlock(GraphTile):
    """A block of queries, which may go beyond the last one."""

    def __init__(
        self, lengths: GraphLengths, graph: Graph, rows: TileRange, columns: TileRange, last: GraphValue
    ) -> None:
        super().__init__(lengths, graph, rows, columns)
        self.last = last

    @cached_property
    def rows(self) -> GraphValue:
        return counting.smaller(self._numbers(self.row_range), self.last)

    def cut(self, value: GraphValue) -> GraphValue:
        # A Slice would end at the last query; Gather repeats its row for the padding.
        rows = self.rows if value.ndim > 1 and value.shape[-2] != 1 else None
        value = value if rows is None else ops.gather(value, rows, value.ndim - 2)
        return self._cut(value, -1, self.column_range)


def _stacked(shape: SymbolicShape, axis: int) -> SymbolicShape:
    return (*shape[:axis], "blocks", *shape[axis:])


def _joined(value: GraphValue, axis: int, length: int | str, queries: GraphValue | None) -> GraphValue:
    """(..., blocks, rows, ...) -> (..., L, ...), without the padding of the last block."""
    graph, rest = value.graph, value.shape[axis + 2 :]
    target = graph.constant([*[0] * axis, -1, *rest], "int64")
    padded = length if queries is None else "padded"
    joined = ops.reshape_to(value, target, (*value.shape[:axis], padded, *rest))
    if queries is None:
        return joined
    return ops.cut(joined, (graph.constant([0], "int64"), queries), axis - joined.ndim, length)
