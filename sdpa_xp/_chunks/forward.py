"""The output and the log-sum-exp of a chunked call: a state for each block, and trees that merge them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from sdpa_xp._chunks.call import GraphCall
from sdpa_xp._chunks.cutting import QUERY_AXES, Place, aligned_axes, chunks_along
from sdpa_xp._chunks.tasks import lse_of, lse_parts_of, merged, output_of, partial_state, state_without_keys
from sdpa_xp._libraries import dtype_name
from sdpa_xp._libraries.protocols import Array, Chunks, Dtype, Key

Graph: TypeAlias = dict[Key, tuple[Any, ...]]


def attend(cut: GraphCall, dtype: Dtype, *, in_parts: bool = False) -> tuple[Array, Array]:
    """Return output (..., Hq, L, Ev) in `dtype`, and log-sum-exp (..., Hq, L) in the accumulation dtype.

    With `in_parts` the log-sum-exp is (..., Hq, L, 2), as in `streaming.attend`. Both are lazy.
    """
    token = cut.graphs.token(cut.token, dtype_name(dtype), in_parts)
    partials, merges, outputs, lses = (f"attention-{s}-{token}" for s in ("partial", "merge", "output", "lse"))
    partial_tasks, merge_tasks, output_tasks, lse_tasks = (Graph() for _ in range(4))
    at_once = cut.graphs.merged_at_once()
    for rows in cut.rows():
        keys = _add_partials(cut, rows, partials, partial_tasks)
        keys = reduction(merged, keys, at_once, merges, rows, merge_tasks)
        sinks = () if cut.sinks is None else (cut.key_of(cut.sinks, (*rows, 0)),)
        output_tasks[(outputs, *rows, 0)] = (partial(output_of, dtype_name(dtype)), keys, *sinks)
        lse_tasks[(lses, *rows, 0) if in_parts else (lses, *rows)] = (
            lse_parts_of if in_parts else lse_of,
            keys,
            *sinks,
        )
    states = {partials: partial_tasks} | ({merges: merge_tasks} if merge_tasks else {})
    shape = (*cut.grid.shape[:-1], cut.width)
    chunks = chunks_along(cut.pieces, shape, aligned_axes(QUERY_AXES, len(shape)))

    def array(name: str, tasks: Graph, chunks: Chunks, dtype: Dtype) -> Array:
        lazy: Array = cut.graphs.array({**states, name: tasks}, cut.inputs, chunks, dtype, cut.query.array)
        return lazy

    lse_chunks = (*chunks[:-1], *([(2,)] if in_parts else []))
    return array(outputs, output_tasks, chunks, dtype), array(lses, lse_tasks, lse_chunks, cut.grid.dtype)


def _add_partials(cut: GraphCall, rows: Place, name: str, tasks: Graph) -> list[Key]:
    """Add a task for each block of a chunk of queries; returns their keys."""
    keys: list[Key] = []
    key: Key
    for place in cut.blocks_of(rows):
        key = (name, *place)
        compute = partial(partial_state, cut.shared, cut.pieces.block(place))
        tasks[key] = (compute, *cut.keys_of((cut.query, cut.key, cut.value, *cut.arrays), place))
        keys.append(key)
    if not keys:
        key = (name, *rows, "none")
        compute = partial(state_without_keys, cut.shared, cut.pieces.block(rows), cut.width)
        tasks[key] = (compute, cut.key_of(cut.query, (*rows, 0)))
        keys.append(key)
    return keys


def reduction(
    function: Callable[..., Any], keys: list[Key], at_once: int, name: str, place: Place, tasks: Graph
) -> list[Key]:
    """Add tasks that apply `function` to lists of results in a tree; returns at most `at_once` last keys."""
    level = 0
    while len(keys) > at_once:
        groups = [keys[first : first + at_once] for first in range(0, len(keys), at_once)]
        keys = []
        for number, group in enumerate(groups):
            key: Key = (name, *place, level, number)
            tasks[key] = (function, group)
            keys.append(key)
        level += 1
    return keys
