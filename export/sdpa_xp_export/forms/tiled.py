"""MatMul and Softmax, of all pairs or in a Loop over blocks of queries.

Every runtime since opset 17 computes the primitive form to the contract, and it can state every call. In the
tiled form no more than a block of scores exists, with any mask.

On a CPU, a block of many scores is cut into parts of its heads, which stay in the caches of a core.

The body of the Loop uses values of the graph around it. Tools that cut, join or rename graphs
(`onnx.utils.extract_model`, `onnx.compose`) follow the inputs of nodes, and do not look for what a body
captures. Keys and values as states of the loop would show them, but onnxruntime copies the states of a Scan in
each step (1.13 to 1.28 of the time at L = 4096), and those of a Loop at its end (1.2 of the memory). So the
loop carries the sum of the lengths of what its body captures.

On a GPU no integer moves between host and device in a step, because each move is a wait. onnxruntime leaves on
the host what follows from a Shape in the same graph, from its constants and from its inputs
(`GetCpuPreferredNodes` of fallback_cpu_capability.cc), and it moves a loop to the host if all its inputs are
there. So the number of a step is multiplied with a length of 1 that only a run knows, and the loop has no count
of its steps: each says whether another one follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from .. import _arrays as xp
from .._arrays import ops
from .._call.call import ExportCall
from .._call.mask_analysis import is_only_causal, may_mask
from .._call.operands import AXES, SUMS_OF_QUERIES
from .._graph import Graph, GraphValue
from .._runtime.releases import Runtime
from ..lowering.blocks import HeadPart, HeadParts, head_parts, key_range
from ..lowering.formula import all_allowed
from ..lowering.tile import GraphLengths, GraphTile, KeyMask, LengthsAsData, LengthsInBody, TileRange
from ..lowering.tile_attention import attend_tile, most_blocks, scale_query, sums_of
from .form import Form, FormInputs, finished_outputs, read_inputs

ROWS = 128
"""Queries in a block. A block meets all keys that it may attend at once, so its softmax is the plain one."""


def _write_whole(graph: Graph, call: ExportCall) -> dict[str, GraphValue]:
    """query, key, value -> MatMul -> soft cap -> biases -> Where -> Softmax -> Where -> MatMul.

    Half inputs are computed in float32.
    """
    inputs = read_inputs(graph, call, call.accumulation_dtype)
    tile = GraphTile.of_all_pairs(inputs.lengths, inputs.key)
    query = scale_query(tile, inputs.query)
    results = attend_tile(tile, query, inputs.key, inputs.value)
    results |= {total.name: total.of_whole(tile, results[total.name]) for total in sums_of(call)}
    return finished_outputs(inputs, results)


def _unsupported_reason(call: ExportCall, _runtime: Runtime) -> str | None:
    if {"weights", "scores"} & set(call.outputs):
        return "weights and scores are L x S arrays, which its blocks avoid"
    return None


def _write_tiled(graph: Graph, call: ExportCall) -> dict[str, GraphValue]:
    """query, key, value -> Loop over blocks(Slice queries and keys -> attention) -> Reshape, Slice.

    Blocks are counted from the last query on: only the one of the first queries may be shorter than the others.
    """
    ranks = [spec.ndim for spec in (call.query, call.key, call.value)]
    inputs = read_inputs(graph, call, call.accumulation_dtype, max(3, *ranks))
    length = call.sizes.queries
    even = isinstance(length, int) and length % min(length, ROWS) == 0
    key, value, key_mask = _hide_keys(inputs.lengths, inputs.key, inputs.value)
    inputs = replace(inputs, key=key, value=value)
    whole = GraphTile.of_all_pairs(LengthsAsData(inputs.lengths), key)
    sums, most = sums_of(call), most_blocks(call, ROWS)
    names = [name for name in AXES if name in call.outputs and name not in SUMS_OF_QUERIES]
    parts = None if sums else head_parts(inputs.lengths, ROWS)

    def step(body: Graph, number: GraphValue, totals: Sequence[GraphValue]) -> Step:
        part = None if parts is None else HeadPart(body, parts, number)
        tile = _QueryBlock.of_step(whole, body, part.block if part else number, inputs, key_mask)
        tile, results = _attend_block(tile, inputs, part, even=even)
        left = tile.start if part is None else xp.maximum(tile.start, part.left, exact=False)
        added = [s.added(tile, total, results[s.name]) for s, total in zip(sums, totals, strict=True)]
        return left > 0, added, [results[name] for name in names]

    # Under the diagonal, the last block has the most keys: what it takes is enough for all that follow.
    starts = [s.start(inputs.lengths, most) for s in sums]
    totals, blocks = loop_over_steps(graph, step, starts)
    joined = {name: _joined(inputs, stacked, parts, even) for name, stacked in zip(names, blocks, strict=True)}
    joined |= {s.name: s.finished(inputs.lengths, total) for s, total in zip(sums, totals, strict=True)}
    return finished_outputs(inputs, joined)


def _hide_keys(
    lengths: GraphLengths, key: GraphValue, value: GraphValue
) -> tuple[GraphValue, GraphValue, KeyMask | None]:
    """Return the keys and values that are left of all, and what is masked there.

    Keys that no query attends are cut off if they are the last ones of all batch entries, and else 0. Nothing
    is done if no mask says so by itself, or if a bias may be infinite: -inf + inf would be NaN. With a cache,
    few queries meet many keys, and a copy of these takes longer than to mask the scores.
    """
    call, graph = lengths.call, lengths.graph
    queries, columns = TileRange("queries", call.sizes.queries), TileRange("keys", key.dims[-2])
    masks = tuple(mask for mask in call.masks if mask.hides_whole_keys)
    if not masks or call.cached or any(map(may_mask, call.biases)):
        return key, value, None
    last_query = xp.expand_dims(lengths.queries, axis=0) - 1
    kept = key_range(
        GraphTile(lengths, graph, queries, columns, masks), graph.constant([0], "int64"), last_query
    )
    if kept is not None:  # with a name that no caller can write
        key, value = (ops.cut(array, kept, -2, "kept keys") for array in (key, value))
        columns = TileRange("keys", "kept keys", kept)
    allowed = all_allowed(GraphTile(lengths, graph, queries, columns, masks), masks)
    assert isinstance(allowed, GraphValue)
    allowed = ops.to_rank(allowed, 2)
    key, value = (xp.where(xp.matrix_transpose(allowed), array, 0.0) for array in (key, value))
    added = xp.where(allowed, graph.constant(0.0, key.elem_type), -math.inf)
    return key, value, KeyMask(allowed, added)


def _rows(lengths: GraphLengths) -> GraphValue:
    """The queries of a block, (1,). Without a query there is one block of one row."""
    length = lengths.call.sizes.queries
    if isinstance(length, int):
        return lengths.graph.constant([min(length, ROWS)], "int64")
    return xp.clip(lengths.length(length), 1, ROWS, exact=False)


def _attend_block(
    tile: _QueryBlock, inputs: FormInputs, part: HeadPart | None, *, even: bool
) -> tuple[_QueryBlock, dict[str, GraphValue]]:
    """A block of queries -> the same with the keys that it may attend alone, and attention over these."""
    body, bounds = tile.graph, tile.row_range.bounds
    assert bounds is not None
    first, stop = bounds
    # A block is cut and scaled here, because copies of all queries would take more memory.
    rows = tile.row_range if even else replace(tile.row_range, length="real rows")
    real = GraphTile(tile.lengths, body, rows, tile.column_range, tile.masks)
    query = real.cut_queries(body.here(inputs.query))
    query = query if part is None else ops.cut(query, part.query_heads, -3, part.dims[1])
    query = scale_query(real, query)
    if not even:
        query = _padded(query, first - tile.start)
    body.declare(query)
    key, value = body.here(inputs.key), body.here(inputs.value)
    keys = key_range(tile, first, stop - 1)
    if part is not None:
        tile = replace(tile, folds=part.folds)
        key, value = part.cut_keys(key, value, keys)
    elif keys is not None:
        key, value = (ops.cut(array, keys, -2, "block keys") for array in (key, value))
    if keys is not None:
        tile = replace(tile, column_range=TileRange("keys", "block keys", keys))
        if tile.key_mask is not None:
            mask = KeyMask(tile.cut(tile.key_mask.allowed), tile.cut(tile.key_mask.added))
            tile = replace(tile, key_mask=mask)
    return tile, attend_tile(tile, query, key, value)


def _padded(query: GraphValue, missing: GraphValue) -> GraphValue:
    """(..., real, E) -> (..., rows, E), with rows of 0 before the first query."""
    graph = query.graph
    before, behind = (graph.constant([0] * length, "int64") for length in (query.ndim - 2, query.ndim + 1))
    shape = (*query.dims[:-2], "block rows", query.dims[-1])
    pads = xp.concat([before, missing, behind])
    return graph.add("Pad", query, pads, dtype=query.elem_type, shape=shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class _QueryBlock(GraphTile):
    """A block of queries, which may begin before the first one."""

    start: GraphValue
    """The first row, (1,), which is negative where rows are missing."""
    stop: GraphValue

    @classmethod
    def of_step(
        cls, whole: GraphTile, graph: Graph, number: GraphValue, inputs: FormInputs, key_mask: KeyMask | None
    ) -> _QueryBlock:
        """The number of a step, (1,) -> its block of queries, and the keys that are left of all."""
        queries, masks = whole.call.sizes.queries, whole.masks
        host = LengthsInBody(graph, inputs.lengths, inputs.query, inputs.key)
        rows = _rows(host)
        stop = host.length(queries) - number * rows
        start = stop - rows
        first = xp.maximum(start, 0, exact=False)
        if key_mask is not None:
            masks = tuple(mask for mask in masks if not mask.hides_whole_keys)
            key_mask = KeyMask(graph.here(key_mask.allowed), graph.here(key_mask.added))
        length = 1 if queries == 1 else "block rows"  # an axis of 1 is never cut
        ranges = TileRange("queries", length, (first, stop)), TileRange("keys", inputs.key.dims[-2])
        return cls(
            whole.lengths, graph, *ranges, masks, key_mask, in_body=host, outer=whole, start=start, stop=stop
        )

    @property
    def hides_keys(self) -> bool:
        """Whether keys outside `key_mask` exist that no query of the block may attend to."""
        if self.key_mask is None:
            return super().hides_keys
        # Under the diagonal alone, the block's last query attends each key of its range, so none is hidden.
        return bool(self.masks) and not is_only_causal(self.masks, self.call.biases)

    @cached_property
    def row_numbers(self) -> GraphValue:
        return self._numbers(replace(self.row_range, bounds=(self.start, self.stop)))

    @cached_property
    def rows(self) -> GraphValue:
        # Missing rows count as the first query: each index that masks ask for exists.
        return xp.maximum(self.row_numbers, 0, exact=False)

    def blocks_of_queries(self, size: int) -> tuple[GraphValue, GraphValue]:
        first = xp.floor_divide(ops.scalar(xp.maximum(self.start, 0, exact=False)), size, exact=False)
        return first, self.graph.constant(most_blocks(self.call, ROWS), "int64")

    def cut(self, value: GraphValue) -> GraphValue:
        # A Slice would begin at the first query; Gather repeats its row for the missing ones.
        rows = self.rows if value.ndim > 1 and value.dims[-2] != 1 else None
        value = value if rows is None else xp.take(value, rows, axis=value.ndim - 2)
        columns = self.column_range
        if columns.length == "kept keys":  # the first ones
            zero = self.graph.constant([0], "int64")
            columns = replace(columns, bounds=(zero, self.host.key_count))
        return self._cut(value, -1, columns)


def _joined(inputs: FormInputs, blocks: GraphValue, parts: HeadParts | None, even: bool) -> GraphValue:
    """(steps, ..., rows, ...), the last block first -> (..., L, ...), without the missing rows."""
    graph, axis, lengths = blocks.graph, inputs.query.ndim - 1, inputs.lengths
    before, rest = blocks.dims[1:axis], blocks.dims[axis + 1 :]
    length = inputs.call.sizes.queries
    queries, rows = lengths.length(length), _rows(lengths)
    # The count of blocks is at least 1, as without a query.
    count = xp.maximum(xp.floor_divide(queries + (rows - 1), rows, exact=False), 1, exact=False)
    # The standard stacks what a loop returns. ONNX's evaluator joins it, but the numbers have the same order.
    steps, dims, moved, kept = [count], blocks.dims, list(range(1, axis)), [0] * len(before)
    outer = [lengths.length(name) for name in before[: -1 if parts else None]]
    if parts is not None:
        kept[-1] = heads = inputs.call.sizes.query_heads
        outer.append(parts.queries)
        steps, dims, moved = (
            [count, parts.number],
            ("all blocks", "all parts", *dims[1:]),
            [*range(2, axis), 1, axis],
        )
        before = (*before[:-1], heads)
    shape = [*steps, *outer, rows, *(lengths.length(name) for name in rest)]
    blocks = ops.reverse(xp.reshape(blocks, xp.concat(shape), dims=dims))
    blocks = xp.permute_dims(blocks, [*moved, 0, *range(len(moved) + 1, blocks.ndim)])
    target = graph.constant([*kept, -1, *rest], "int64")
    joined = xp.reshape(blocks, target, dims=(*before, length if even else "padded queries", *rest))
    if even:
        return joined
    stop = count * rows
    return ops.cut(joined, (stop - queries, stop), axis - 1 - joined.ndim, length)


Step: TypeAlias = tuple[GraphValue, Sequence[GraphValue], Sequence[GraphValue]]
"""Whether another step follows, (1,), which must follow from the number of the step alone; sums; results."""


def loop_over_steps(
    graph: Graph,
    step: Callable[[Graph, GraphValue, Sequence[GraphValue]], Step],
    starts: Sequence[GraphValue] = (),
) -> tuple[list[GraphValue], list[GraphValue]]:
    """Write a Loop over the steps 0, 1, ..., and return the sums of all, and the results, stacked in order.

    Args:
        graph: The graph around the loop.
        step: Writes a step into the body of the loop, from the number of the step, (1,), and the sums so far.
        starts: The sums before the first step.
    """
    body = graph.loop_body()
    number = body.input("Iteration", "int64", ())
    body.input("GoesOn", "bool", ())
    carried = body.input("Captured", "int64", ("just one",))
    one = ops.shape_of(carried)
    so_far = [body.input("SumSoFar", start.elem_type, start.dims) for start in starts]
    goes_on, sums, results = step(body, number * one, so_far)
    # An output of a body must be the output of a node.
    states = [ops.scalar(goes_on), body.copy(carried), *sums]
    body.prune([*states, *results])
    stacked = [(result.elem_type, ("all steps", *result.dims)) for result in results]
    captured = _sum_of_captured(body)
    outputs = graph.add_many(
        "Loop",
        None,
        graph.constant(value=True, dtype="bool"),
        captured,
        *starts,
        outputs=[("int64", captured.dims), *[(start.elem_type, start.dims) for start in starts], *stacked],
        body=body.subgraph([*states, *results]),
    )
    return outputs[1 : 1 + len(starts)], outputs[1 + len(starts) :]


def _sum_of_captured(body: Graph) -> GraphValue:
    """What a body captures -> an integer that follows from each of it, (1,)."""
    used = {name for node in body.written.nodes for name in node.input}
    parts = [
        value if (value.elem_type, value.dims) == ("int64", (1,)) else ops.shape_of(value)
        for value in body.captured.values()
        if value.name in used
    ]
    return ops.reduce("ReduceSum", xp.concat(parts))


TILED = Form(
    "tiled", _write_tiled, _unsupported_reason, nodes="MatMul and Softmax in a Loop over blocks of queries"
)
PRIMITIVE = Form("primitive", _write_whole, nodes="MatMul and Softmax")  # it can state every call
