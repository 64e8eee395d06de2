"""The weights and the scores of a chunked call: L x S arrays whose chunks are the blocks of the call."""

from __future__ import annotations

import math
from functools import partial

from sdpa_xp._chunks.call import GraphCall
from sdpa_xp._chunks.cutting import aligned_axes, chunks_along
from sdpa_xp._chunks.forward import Graph, reduction
from sdpa_xp._chunks.tasks import block_scores, block_sums, block_weights, filled, merged_sums
from sdpa_xp._libraries import dtype_name
from sdpa_xp._libraries.protocols import Array, Dtype, Key


def scores(cut: GraphCall, dtype: Dtype) -> Array:
    """Return the scores, (..., Hq, L, S), lazily."""
    name = f"attention-scores-{cut.graphs.token(cut.token, dtype_name(dtype))}"
    compute = partial(block_scores, cut.shared)
    tasks: Graph = {}
    for rows in cut.rows():
        for place in cut.blocks_of(rows):
            keys = cut.keys_of((cut.query, cut.key, *cut.arrays), place)
            tasks[(name, *place)] = (partial(compute, cut.pieces.block(place), dtype_name(dtype)), *keys)
    return _array(cut, {}, name, tasks, -math.inf, dtype)


def weights(cut: GraphCall, dtype: Dtype) -> Array:
    """Return the weights, (..., Hq, L, S), lazily."""
    token = cut.graphs.token(cut.token, dtype_name(dtype))
    partials, merges, sums, name = (f"attention-{s}-{token}" for s in ("sums", "merge", "row-sums", "weights"))
    partial_tasks, merge_tasks, sum_tasks, tasks = (Graph() for _ in range(4))
    at_once = cut.graphs.merged_at_once()
    for rows in cut.rows():
        places = cut.blocks_of(rows)
        keys: list[Key] = []
        for place in places:
            key: Key = (partials, *place)
            operands = cut.keys_of((cut.query, cut.key, *cut.arrays), place)
            partial_tasks[key] = (partial(block_sums, cut.shared, cut.pieces.block(place)), *operands)
            keys.append(key)
        keys = reduction(merged_sums, keys, at_once, merges, rows, merge_tasks)
        if keys:
            sinks = () if cut.sinks is None else (cut.key_of(cut.sinks, (*rows, 0)),)
            sum_tasks[(sums, *rows)] = (merged_sums, keys, *sinks)
        for place in places:
            compute = partial(block_weights, cut.shared, cut.pieces.block(place), dtype_name(dtype))
            of_block = cut.keys_of((cut.query, cut.key), place)
            tasks[(name, *place)] = (compute, *of_block, (sums, *rows), *cut.keys_of(cut.arrays, place))
    stages = {partials: partial_tasks, merges: merge_tasks, sums: sum_tasks}
    return _array(cut, stages, name, tasks, 0.0, dtype)


def _array(
    cut: GraphCall, stages: dict[str, Graph], name: str, tasks: Graph, empty: float, dtype: Dtype
) -> Array:
    """Return the array of `tasks`, with a block of `empty` where a mask has left no task."""
    for rows in cut.rows():
        for number in range(len(cut.pieces.ranges[-1])):
            place = (*rows, number)
            if (name, *place) not in tasks:
                compute = partial(filled, cut.pieces.block(place).shape, dtype_name(dtype), empty)
                tasks[(name, *place)] = (compute, cut.key_of(cut.query, place))
    chunks = chunks_along(cut.pieces, cut.grid.shape, aligned_axes((), len(cut.grid.shape)))
    used = {stage: of_stage for stage, of_stage in stages.items() if of_stage}
    array: Array = cut.graphs.array({**used, name: tasks}, cut.inputs, chunks, dtype, cut.query.array)
    return array
