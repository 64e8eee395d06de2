"""A call as a graph of tasks, for Dask: one task for each block, and trees that merge or sum what they return.

Blocks that a mask empties have no task. The keys of tasks say what they compute.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import product
from typing import Any, TypeAlias

from .._libraries import dtype_name
from .._libraries.dask import DaskGraphs
from .._libraries.protocols import Array, Chunks, Dtype, Key
from .._programs import ResultName
from .._tiles import Target
from . import tasks
from .blocks import KEY_HEADS, QUERY_AXES, AlignedArray, Axis, Place, aligned_axes
from .cutting import CutCall

AXES: Mapping[str | None, Axis] = {"rows": -2, "columns": -1, None: None}
Contributions: TypeAlias = Mapping[tuple[int, ...], list[Key]]
"""The tasks that contribute to each block of a gradient."""


class GraphCall(CutCall):
    """A call that becomes a graph of tasks."""

    @cached_property
    def token(self) -> str:
        """A text that is the same for equal calls of the same arrays, and else another."""
        return self.library.token(self.shared, [self.library.name_of(array) for array in self.inputs])

    def attend(self, dtype: Dtype, *names: ResultName) -> dict[str, Array]:
        """Return what is named, lazily: output (..., Hq, L, Ev) in `dtype`, log-sum-exp (..., Hq, L).

        The log-sum-exp, also as two numbers (..., Hq, L, 2), has the accumulation dtype.
        """
        graph = Stages(self.library, self.token, dtype_name(dtype), names)
        compute: Mapping[str, Callable[..., Array]] = {
            "output": partial(tasks.output_of, dtype_name(dtype)),
            "lse": tasks.lse_of,
            "lse_parts": tasks.lse_parts_of,
        }
        for rows in self.rows():
            keys = []
            for place in self.blocks_of(rows):
                operands = self.keys_of((self.query, self.key, self.value, *self.arrays), place)
                keys.append(graph.add("partial", place, self._of_block(tasks.partial_state, place), *operands))
            if not keys:  # the output needs a state of the library and the dtype that only a chunk shows
                empty = self._of_block(tasks.empty_state, rows, self.width)
                keys = [graph.add("partial", (*rows, "none"), empty, self.key_of(self.query, (*rows, 0)))]
            keys = graph.reduce("merge", rows, tasks.merged, keys)
            for name in names:
                place = rows if name == "lse" else (*rows, 0)
                graph.add(name, place, compute[name], keys, *self.sinks_of(rows))
        chunks, accumulation = self.output_chunks, self.grid.dtype
        kinds = {
            "output": (chunks, dtype),
            "lse": (chunks[:-1], accumulation),
            "lse_parts": ((*chunks[:-1], (2,)), accumulation),
        }
        return {name: self._array(graph, ["partial", "merge", name], *kinds[name]) for name in names}

    def scores(self, dtype: Dtype) -> Array:
        """Return the scores, (..., Hq, L, S), lazily."""
        graph = Stages(self.library, self.token, dtype_name(dtype))
        for rows in self.rows():
            for place in self.blocks_of(rows):
                compute = self._of_block(tasks.block_scores, place, dtype_name(dtype))
                graph.add("scores", place, compute, *self.keys_of((self.query, self.key, *self.arrays), place))
        return self._all_pairs(graph, ["scores"], -math.inf, dtype)

    def weights(self, dtype: Dtype) -> Array:
        """Return the weights, (..., Hq, L, S), lazily."""
        graph = Stages(self.library, self.token, dtype_name(dtype))
        for rows in self.rows():
            places, keys = self.blocks_of(rows), []
            for place in places:
                operands = self.keys_of((self.query, self.key, *self.arrays), place)
                keys.append(graph.add("sums", place, self._of_block(tasks.row_sums, place), *operands))
            if not keys:  # no query attends: `_all_pairs` fills these blocks
                continue
            keys = graph.reduce("merge", rows, tasks.merged, keys)
            lse = graph.add("lse", rows, tasks.lse_parts_of, keys, *self.sinks_of(rows))
            for place in places:
                compute = self._of_block(tasks.block_weights, place, dtype_name(dtype))
                operands = self.keys_of((self.query, self.key), place)
                graph.add("weights", place, compute, *operands, lse, *self.keys_of(self.arrays, place))
        return self._all_pairs(graph, ["sums", "merge", "lse", "weights"], 0.0, dtype)

    def gradients(
        self, output: Array, lse: Array, targets: Mapping[str, Target], names: Iterable[str], cotangent: Array
    ) -> dict[str, Array]:
        """Return the gradient of each target, in the accumulation dtype; all of them are lazy.

        `lse` is in parts. `names` are those of the caller's floating arrays, as for `gradient_targets`.
        """
        axes = aligned_axes(QUERY_AXES, cotangent.ndim)
        cotangent = self.library.in_chunks(cotangent, self.pieces.chunks(cotangent.shape, axes), self.like)
        of_rows = [AlignedArray(array, axes) for array in (cotangent, output, lse)]
        graph = Stages(self.library, self.token, self.library.name_of(cotangent))
        contributions = self._contributions(graph, of_rows, targets, tuple(names))
        computed = {}
        for target, of_target in targets.items():
            chunks = self.pieces.chunks(of_target.shape, _axes_of(of_target))
            stages = self._add_sums(graph, target, chunks, contributions[target])
            inputs = cotangent, output, lse
            computed[target] = self._array(graph, ["gradient", *stages], chunks, self.grid.dtype, inputs)
        return computed

    def _of_block(self, function: Callable[..., Any], place: Place, *differing: object) -> partial[Any]:
        """Return `function` of the call, the block at a place, and what differs between its tasks."""
        # No closure: a scheduler may send a task to another process, and pickle takes no closure.
        return partial(function, self.shared, self.pieces.block(place), *differing)

    def _contributions(
        self,
        graph: Stages,
        of_rows: Sequence[AlignedArray],
        targets: Mapping[str, Target],
        names: tuple[str, ...],
    ) -> Mapping[str, Contributions]:
        """Add a task for each block, and return what contributes to each gradient."""
        contributions: dict[str, dict[tuple[int, ...], list[Key]]] = {x: defaultdict(list) for x in targets}
        for rows in self.rows():
            # Only the first block of a row has the sinks: their gradient is one for the whole row.
            sinks = [] if self.sinks is None else [self.sinks]
            for place in self.blocks_of(rows):
                compute = self._of_block(tasks.partial_gradients, place, names, bool(sinks))
                operands = [self.query, self.key, self.value, *of_rows, *self.arrays, *sinks]
                key = graph.add("gradient", place, compute, *self.keys_of(operands, place))
                for target, of_target in targets.items():
                    if target != "sinks" or sinks:
                        numbers = self.pieces.numbers(of_target.shape, _axes_of(of_target), place)
                        contributions[target][numbers].append(key)
                sinks = []
        return contributions

    def _add_sums(self, graph: Stages, target: str, chunks: Chunks, contributions: Contributions) -> list[str]:
        """Add the tasks that sum the contributions to each block of a gradient, and return their stages."""
        stage, part, at_once = f"sum-{target}", f"sum-{target}-part", self.library.merged_at_once()
        pick = partial(tasks.total_of, target)  # a task of a block returns what it contributes to all gradients
        # Zeros are made by a task too, which learns the library of the arrays from a chunk of the query.
        query_key = self.key_of(self.query, (0,) * len(self.pieces.ranges))
        for numbers in product(*(range(len(lengths)) for lengths in chunks)):
            keys = contributions.get(numbers, [])
            if not keys:
                shape = tuple(lengths[number] for lengths, number in zip(chunks, numbers, strict=True))
                graph.add(stage, numbers, partial(tasks.filled, shape, self.shared.dtype, 0.0), query_key)
            elif len(keys) <= at_once:
                graph.add(stage, numbers, pick, keys)
            else:
                groups = range(0, len(keys), at_once)
                picked = [graph.add(part, (*numbers, n), pick, keys[n : n + at_once]) for n in groups]
                graph.add(stage, numbers, tasks.total, graph.reduce(part, numbers, tasks.total, picked))
        return [part, stage]

    def _all_pairs(self, graph: Stages, stages: list[str], empty: float, dtype: Dtype) -> Array:
        """Return the array of the last stage, with a block of `empty` where a mask has left no task."""
        for rows in self.rows():
            for number in range(len(self.pieces.ranges[-1])):
                place = (*rows, number)
                if not graph.has(stages[-1], place):
                    compute = partial(tasks.filled, self.pieces.block(place).shape, dtype_name(dtype), empty)
                    graph.add(stages[-1], place, compute, self.key_of(self.query, place))
        chunks = self.pieces.chunks(self.grid.shape, aligned_axes((), len(self.grid.shape)))
        return self._array(graph, stages, chunks, dtype)

    def _array(
        self, graph: Stages, stages: Sequence[str], chunks: Chunks, dtype: Dtype, more: Sequence[Array] = ()
    ) -> Array:
        """Return the array of the last of `stages`, which needs the others, and `more` inputs."""
        inputs = [*self.inputs, *more]
        array: Array = self.library.array(graph.graph(stages), inputs, chunks, dtype, self.like)
        return array


class Stages:
    """The tasks of a graph by their stage; a task needs tasks of its own stage and of earlier ones."""

    def __init__(self, graphs: DaskGraphs, *differing: object) -> None:
        self._token, self._at_once = graphs.token(*differing), graphs.merged_at_once()
        self._tasks: dict[str, dict[Key, tuple[Any, ...]]] = defaultdict(dict)

    def add(
        self,
        stage: str,
        place: tuple[int | str, ...],
        function: Callable[..., Any],
        *arguments: Key | list[Key],
    ) -> Key:
        """Add a task that calls `function` with the results of other tasks, or with lists of them."""
        key: Key = (self._name(stage), *place)
        self._tasks[stage][key] = (function, *arguments)
        return key

    def has(self, stage: str, place: Place) -> bool:
        return (self._name(stage), *place) in self._tasks[stage]

    def reduce(self, stage: str, place: Place, function: Callable[..., Any], keys: list[Key]) -> list[Key]:
        """Apply `function` to lists of results in a tree; returns at most as many keys as a task merges."""
        # A task that merged all keys of a long row would hold the states of all of them.
        level = 0  # equal places of two levels are two tasks
        while len(keys) > self._at_once:
            groups = [keys[first : first + self._at_once] for first in range(0, len(keys), self._at_once)]
            keys = [self.add(stage, (*place, level, n), function, group) for n, group in enumerate(groups)]
            level += 1
        return keys

    def graph(self, stages: Iterable[str]) -> dict[str, dict[Key, tuple[Any, ...]]]:
        """Return the tasks of those of `stages` that have some, by the names that their keys begin with."""
        return {self._name(stage): self._tasks[stage] for stage in stages if self._tasks[stage]}

    def _name(self, stage: str) -> str:
        return f"attention-{stage}-{self._token}"


def _axes_of(target: Target) -> tuple[Axis, ...]:
    rows, columns = (AXES[axis] for axis in target.axes)
    heads: tuple[Axis, ...] = (KEY_HEADS if rows == -1 else -3, rows, columns)
    return aligned_axes(heads, len(target.shape))
