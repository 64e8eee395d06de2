"""A call as streams of chunks, for cubed: chunks of queries are folded over one chunk of keys after the other.

A task holds one chunk of queries, one of keys and values, and a state, however many keys it reads. Chunks of
keys that a mask empties are not read. A task reads a few chunks of keys, and a second operation merges the
states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial, reduce
from typing import NamedTuple

from .._libraries import dtype_name, namespace_of
from .._libraries.cubed import CubedStreams
from .._libraries.protocols import Array, Chunks, Dtype, Key
from .blocks import Pieces, Place
from .cutting import CutCall
from .tasks import ChunkedCall, empty_state, lse_of, merged, output_of, partial_state
from .windows import State

FOLDED_AT_ONCE = 8
"""Chunks of keys that a task reads."""
TILES = 2**24
"""Bytes for the tiles of scores of a task, with what is computed from them: several times `ONE_CORE`."""


class StreamedCall(CutCall[CubedStreams]):
    """A call whose chunks of queries are folded over streams of keys."""

    def attend(self, dtype: Dtype) -> tuple[Array, Array]:
        """Return output (..., Hq, L, Ev) in `dtype`, and log-sum-exp (..., Hq, L), lazily."""
        fold = Fold(self.shared, self.pieces, {rows: self.blocks_of(rows) for rows in self.rows()}, self.width)
        # At least one group: queries that the mask leaves without a block have a state too.
        groups = max([1, *(-(-len(blocks) // FOLDED_AT_ONCE) for blocks in fold.blocks.values())])
        chunks = self.output_chunks
        aligned = (self.key, self.value, *self.arrays)

        def blocks_of_fold(block_id: tuple[int, ...]) -> list[Key | list[Key]]:
            *rows, _ = block_id
            places = fold.places(block_id)
            streams = [[self.key_of(array, place) for place in places] for array in aligned]
            return [self.key_of(self.query, (*rows, 0)), *streams]

        # cubed refuses a task that may need more than `allowed_mem`, so these are upper bounds: numbers count
        # as float64, and a merge holds two states, one of them weighed, their sum and the result.
        state_bytes = math.prod(max(lengths) for lengths in chunks[:-1]) * (self.width + 2) * 8
        states = self.library.array(
            "attention-partial",
            partial(folded, fold),
            blocks_of_fold,
            [self.query.array, *(array.array for array in aligned)],
            (*chunks[:-1], (self.width + 2,) * groups),
            self.grid.dtype,
            self._extra_memory() + 4 * state_bytes,
        )

        def blocks_of_rows(block_id: tuple[int, ...]) -> list[Key | list[Key]]:
            rows = block_id[: len(chunks) - 1]
            name = self.library.name_of(states)
            return [[(name, *rows, group) for group in range(groups)], *self.sinks_of(rows)]

        inputs = [states, *([] if self.sinks is None else [self.sinks.array])]

        def array(name: str, function: partial[Array], chunks: Chunks, dtype: Dtype) -> Array:
            memory = 5 * state_bytes
            lazy: Array = self.library.array(name, function, blocks_of_rows, inputs, chunks, dtype, memory)
            return lazy

        output = partial(output_of_folds, dtype_name(dtype))
        return (
            array("attention-output", output, chunks, dtype),
            array("attention-lse", partial(lse_of_folds), chunks[:-1], self.grid.dtype),
        )

    def _extra_memory(self) -> int:
        """Return a task's memory besides chunks and states: wider copies, the next chunks, and tiles."""
        sizes = [
            math.prod(max(lengths) for lengths in self.library.chunks_of(array.array)) * 8
            for array in (self.query, self.key, self.value, *self.arrays)
        ]
        return 2 * sum(sizes) + TILES


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
    places = fold.places(block_id)
    states = (
        partial_state(fold.call, fold.pieces.block(place), query, key, value, *blocks)
        for place, key, value, *blocks in zip(places, keys, values, *arrays, strict=True)
    )
    if places:
        state = reduce(_merge_two, states)
    else:
        state = empty_state(fold.call, fold.pieces.block(block_id[:-1]), fold.width, query)
    xp = namespace_of(state[0])
    return xp.concat([state[0], *(xp.expand_dims(column, axis=-1) for column in state[1:])], axis=-1)


def output_of_folds(dtype: str, states: Iterable[Array], *sinks: Array) -> Array:
    """Merge a stream of states, and return the output."""
    return output_of(dtype, [_merge_stream(states)], *sinks)


def lse_of_folds(states: Iterable[Array], *sinks: Array) -> Array:
    """Merge a stream of states, and return the log-sum-exp."""
    return lse_of([_merge_stream(states)], *sinks)


def _merge_stream(states: Iterable[Array]) -> State:
    """Merge what `folded` has returned, one state at a time, so that no task holds more than two."""
    return reduce(_merge_two, ((state[..., :-2], state[..., -2], state[..., -1]) for state in states))


def _merge_two(one: State, other: State) -> State:
    return merged([one, other])
