"""Parts of the heads of a block: a block of many scores does not fit into the caches of a CPU's core."""

from __future__ import annotations

import math

from sdpa_xp_export import _arrays as xp
from sdpa_xp_export._arrays import ops
from sdpa_xp_export._call.mask_analysis import heads_share_masks
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._runtime.releases import Runtime
from sdpa_xp_export.lowering.graph_lengths import GraphLengths

SCORES_OF_A_STEP = 2**20
"""A block of more scores is cut into parts of its heads. For 8 heads of 2,048 and 4,096 tokens, causal, this
took 0.92 and 0.87 of the time of whole blocks (onnxruntime 1.31, 2 cores), and 0.8 of the memory."""


class HeadParts:
    """The parts that the heads of a block are cut into: their number, and how many key heads each has, (1,)."""

    def __init__(self, lengths: GraphLengths, number: GraphValue) -> None:
        self.heads = lengths.call.sizes.heads
        self.number = number
        self.count = xp.floor_divide(lengths.graph.constant([self.heads], "int64"), number, exact=False)
        self.last = number - 1


def head_parts(lengths: GraphLengths, block: int, runtime: Runtime) -> HeadParts | None:
    """Return the parts of the heads of a block of so many queries; None if its heads stay together.

    Their number divides the key heads, so that all parts are alike and none shares a key head with another.
    """
    call, graph, heads = lengths.call, lengths.graph, lengths.call.sizes.heads
    # On a GPU, more and smaller steps would be more launches. Programs other than onnxruntime were not timed.
    if runtime.provider not in ("cpu", "wasm") or not heads_share_masks(call) or heads == 1:
        return None
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    sizes = (*call.sizes.batch, call.sizes.query_heads, call.sizes.keys)
    queries = call.sizes.queries
    known = math.prod(size for size in sizes if isinstance(size, int))
    names = [size for size in sizes if isinstance(size, str)]
    if isinstance(queries, int) and not names:
        scores = known * min(queries, block)
        number = next((number for number in divisors if number * SCORES_OF_A_STEP >= scores), heads)
        return HeadParts(lengths, graph.constant([number], "int64")) if number > 1 else None
    count = xp.clip(lengths.length(queries), 1, block, exact=False)
    for name in names:
        count = count * lengths.length(name)
    limits = graph.constant([number * SCORES_OF_A_STEP // max(known, 1) for number in divisors], "int64")
    fits = xp.where(limits >= count, graph.constant(divisors, "int64"), heads)
    return HeadParts(lengths, ops.reduce("ReduceMin", fits))


class HeadPart:
    """The heads of a step, if the steps take the parts of a block in turn."""

    def __init__(self, body: Graph, parts: HeadParts, number: GraphValue) -> None:
        """The number of a step, (1,) -> the number of its block, and its key heads."""
        count, self.body, self.heads = body.here(parts.number), body, parts.heads
        self.block = xp.floor_divide(number, count, exact=False)
        index = number - self.block * count
        self.left = body.here(parts.last) - index
        """How many parts of the block follow, (1,)."""
        self.first = index * body.here(parts.count)
        self.stop = self.first + body.here(parts.count)

    def cut_query(self, query: GraphValue) -> GraphValue:
        """(..., Hq, rows, E) -> the heads of the part."""
        heads = query.dims[-3]
        if heads == self.heads:
            return ops.cut(query, (self.first, self.stop), -3, "part_heads")
        assert isinstance(heads, int)
        ratio = heads // self.heads
        return ops.cut(query, (self.first * ratio, self.stop * ratio), -3, "part_query_heads")

    def cut_keys(
        self, key: GraphValue, value: GraphValue, columns: tuple[GraphValue, GraphValue] | None
    ) -> tuple[GraphValue, GraphValue]:
        """key, value -> the heads of the part, and of these the keys in the bounds `columns`."""
        first, stop, axes = self.first, self.stop, [-3]
        if columns is not None:  # with one Slice, because each copies
            first, stop, axes = xp.concat([first, columns[0]]), xp.concat([stop, columns[1]]), [-3, -2]
        bounds = first, stop, self.body.constant(axes, "int64")

        def cut(array: GraphValue) -> GraphValue:
            length = array.dims[-2] if columns is None else "columns"
            shape = (*array.dims[:-3], "part_heads", length, array.dims[-1])
            return self.body.add("Slice", array, *bounds, dtype=array.elem_type, shape=shape)

        return cut(key), cut(value)
