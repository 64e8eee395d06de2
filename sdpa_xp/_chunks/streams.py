"""A call whose chunks of queries are folded over their keys, one chunk of keys after the other.

A task holds one chunk of queries, one of keys and values, and a state, however many keys it reads. Chunks of
keys that a mask empties are not read. A task reads a few chunks of keys, and a second operation merges the
states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from sdpa_xp._chunks.call import StreamedCall
from sdpa_xp._chunks.cutting import QUERY_AXES, Pieces, Place, aligned_axes, chunks_along
from sdpa_xp._chunks.tasks import (
    ChunkedCall,
    State,
    lse_of,
    merged,
    output_of,
    partial_state,
    state_without_keys,
)
from sdpa_xp._libraries import dtype_name, namespace_of
from sdpa_xp._libraries.protocols import Array, Chunks, Dtype, Key

FOLDED_AT_ONCE = 8
"""Chunks of keys that a task reads."""
TILES = 2**24
"""Bytes for the tiles of scores of a task, with what is computed from them: several times `ONE_CORE`."""


class Fold(NamedTuple):
    """What all tasks of a call share. It holds no array."""

    call: ChunkedCall
    pieces: Pieces
    blocks: Mapping[Place, list[Place]]
    """The blocks of each chunk of queries in which a pair may attend."""
    width: int

    def places(self, block_id: tuple[int, ...]) -> list[Place]:
        """Return the blocks that a task reads."""
        *rows, group = block_id
        return self.blocks[tuple(rows)][group * FOLDED_AT_ONCE : (group + 1) * FOLDED_AT_ONCE]


def folded(
    fold: Fold,
    query: Array,
    keys: Iterable[Array],
    values: Iterable[Array],
    *arrays: Iterable[Array],
    block_id: tuple[int, ...],
) -> Array:
    """Return the state of a chunk of queries over a stream of chunks of keys, (..., Hq, L, Ev + 2)."""
    state: State | None = None
    for place, key, value, *blocks in zip(fold.places(block_id), keys, values, *arrays, strict=True):
        new = partial_state(fold.call, fold.pieces.block(place), query, key, value, *blocks)
        state = new if state is None else merged([state, new])
    if state is None:
        state = state_without_keys(fold.call, fold.pieces.block(block_id[:-1]), fold.width, query)
    xp = namespace_of(state[0])
    return xp.concat([state[0], *(xp.expand_dims(column, axis=-1) for column in state[1:])], axis=-1)


def output_of_folds(dtype: str, states: Iterable[Array], *sinks: Array) -> Array:
    """Merge a stream of states, and return the output."""
    return output_of(dtype, [_merged_stream(states)], *sinks)


def lse_of_folds(states: Iterable[Array], *sinks: Array) -> Array:
    """Merge a stream of states, and return the log-sum-exp."""
    return lse_of([_merged_stream(states)], *sinks)


def _merged_stream(states: Iterable[Array]) -> State:
    parts: Iterator[State] = ((state[..., :-2], state[..., -2], state[..., -1]) for state in states)
    whole = next(parts)
    for part in parts:
        whole = merged([whole, part])
    return whole


def attend(cut: StreamedCall, dtype: Dtype) -> tuple[Array, Array]:
    """Return output (..., Hq, L, Ev) in `dtype`, and log-sum-exp (..., Hq, L), lazily."""
    fold = Fold(cut.shared, cut.pieces, {rows: cut.blocks_of(rows) for rows in cut.rows()}, cut.width)
    groups = max(1, *(-(-len(blocks) // FOLDED_AT_ONCE) for blocks in fold.blocks.values()), 1)
    shape = (*cut.grid.shape[:-1], cut.width)
    chunks = chunks_along(cut.pieces, shape, aligned_axes(QUERY_AXES, len(shape)))
    aligned = (cut.key, cut.value, *cut.arrays)

    def blocks_of_fold(block_id: tuple[int, ...]) -> list[Key | list[Key]]:
        *rows, _ = block_id
        places = fold.places(block_id)
        streams = [[cut.key_of(array, place) for place in places] for array in aligned]
        return [cut.key_of(cut.query, (*rows, 0)), *streams]

    state_bytes = math.prod(max(lengths) for lengths in chunks[:-1]) * (cut.width + 2) * 8
    states = cut.streams.array(
        "attention-partial",
        partial(folded, fold),
        blocks_of_fold,
        [cut.query.array, *(array.array for array in aligned)],
        (*chunks[:-1], (cut.width + 2,) * groups),
        cut.grid.dtype,
        _extra_memory(cut) + 4 * state_bytes,
    )

    def blocks_of_rows(block_id: tuple[int, ...]) -> list[Key | list[Key]]:
        rows = block_id[: len(chunks) - 1]
        sinks = [] if cut.sinks is None else [cut.key_of(cut.sinks, (*rows, 0))]
        name = cut.streams.name_of(states)
        return [[(name, *rows, group) for group in range(groups)], *sinks]

    inputs = [states, *([] if cut.sinks is None else [cut.sinks.array])]

    def array(name: str, function: partial[Array], chunks: Chunks, dtype: Dtype) -> Array:
        lazy: Array = cut.streams.array(name, function, blocks_of_rows, inputs, chunks, dtype, 5 * state_bytes)
        return lazy

    output = partial(output_of_folds, dtype_name(dtype))
    return (
        array("attention-output", output, chunks, dtype),
        array("attention-lse", partial(lse_of_folds), chunks[:-1], cut.grid.dtype),
    )


def _extra_memory(cut: StreamedCall) -> int:
    """Return a task's memory besides chunks and states: chunks in a wider dtype, the next ones, and tiles."""
    sizes = [
        math.prod(max(lengths) for lengths in cut.streams.chunks_of(array.array)) * 8
        for array in (cut.query, cut.key, cut.value, *cut.arrays)
    ]
    return 2 * sum(sizes) + TILES
