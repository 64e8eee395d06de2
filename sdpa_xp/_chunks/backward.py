"""The gradients of a chunked call: what each block contributes, and trees that sum it up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from sdpa_xp._chunks.call import GraphCall
from sdpa_xp._chunks.cutting import (
    KEY_HEADS,
    QUERY_AXES,
    AlignedArray,
    Axis,
    aligned_axes,
    chunks_along,
    numbers_at,
)
from sdpa_xp._chunks.forward import Graph, reduction
from sdpa_xp._chunks.tasks import filled, partial_gradients, total, total_of
from sdpa_xp._libraries.protocols import Array, Key
from sdpa_xp._tiles.gradient_target import GradientTarget

AXES: Mapping[str | None, Axis] = {"rows": -2, "columns": -1, None: None}


def gradients(
    cut: GraphCall,
    output: Array,
    lse: Array,
    targets: Mapping[str, GradientTarget],
    names: Iterable[str],
    cotangent: Array,
) -> dict[str, Array]:
    """Return the gradient of each target, in the accumulation dtype; all of them are lazy.

    `lse` is in parts. `names` are those of the caller's floating arrays, as for `gradient_targets`.
    """
    axes = aligned_axes(QUERY_AXES, cotangent.ndim)
    chunks = chunks_along(cut.pieces, cotangent.shape, axes)
    cotangent = cut.graphs.in_chunks(cotangent, chunks, output)
    of_rows = [AlignedArray(array, axes) for array in (cotangent, output, lse)]
    token = cut.graphs.token(cut.token, cut.graphs.name_of(cotangent))
    name = f"attention-gradient-{token}"
    tasks, contributions = _contributions(cut, name, of_rows, targets, tuple(names))
    inputs = [*cut.inputs, cotangent, output, lse]
    computed = {}
    for target, shape_and_axes in targets.items():
        of_target = _target_axes(shape_and_axes)
        shape = shape_and_axes.shape
        target_chunks = chunks_along(cut.pieces, shape, of_target)
        stages = _sums(cut, f"attention-sum-{target}-{token}", target, target_chunks, contributions[target])
        computed[target] = cut.graphs.array(
            {name: tasks, **stages}, inputs, target_chunks, cut.grid.dtype, output
        )
    return computed


def _contributions(
    cut: GraphCall,
    name: str,
    of_rows: Sequence[AlignedArray],
    targets: Mapping[str, GradientTarget],
    names: tuple[str, ...],
) -> tuple[Graph, Mapping[str, Mapping[tuple[int, ...], list[Key]]]]:
    """Return a task for each block, and for each block of each gradient the tasks that contribute to it."""
    tasks: Graph = {}
    contributions: dict[str, dict[tuple[int, ...], list[Key]]] = {
        target: defaultdict(list) for target in targets
    }
    for rows in cut.rows():
        # Only the first block of a row has the sinks: their gradient is one for the whole row.
        sinks = cut.sinks
        for place in cut.blocks_of(rows):
            key: Key = (name, *place)
            aligned = [cut.query, cut.key, cut.value, *of_rows, *cut.arrays, *([sinks] if sinks else [])]
            compute = partial(partial_gradients, cut.shared, cut.pieces.block(place), names, sinks is not None)
            tasks[key] = (compute, *cut.keys_of(aligned, place))
            for target, of_target in targets.items():
                if target != "sinks" or sinks is not None:
                    numbers = numbers_at(cut.pieces, of_target.shape, _target_axes(of_target), place)
                    contributions[target][numbers].append(key)
            sinks = None
    return tasks, contributions


def _sums(
    cut: GraphCall,
    name: str,
    target: str,
    chunks: Sequence[Sequence[int]],
    contributions: Mapping[tuple[int, ...], list[Key]],
) -> dict[str, Graph]:
    """Return the tasks that sum the contributions to each block of a gradient."""
    levels: Graph = {}
    tasks: Graph = {}
    at_once, pick = cut.graphs.merged_at_once(), partial(total_of, target)
    query_key = cut.key_of(cut.query, (0,) * len(cut.pieces.ranges))
    for numbers, shape in _blocks(chunks):
        keys = contributions.get(numbers, [])
        if not keys:
            tasks[(name, *numbers)] = (partial(filled, shape, cut.shared.dtype, 0.0), query_key)
        elif len(keys) <= at_once:
            tasks[(name, *numbers)] = (pick, keys)
        else:
            first: list[Key] = []
            for number in range(0, len(keys), at_once):
                key: Key = (f"{name}-part", *numbers, number)
                levels[key] = (pick, keys[number : number + at_once])
                first.append(key)
            rest = reduction(total, first, at_once, f"{name}-part", (*numbers, -1), levels)
            tasks[(name, *numbers)] = (total, rest)
    return {f"{name}-part": levels, name: tasks} if levels else {name: tasks}


def _blocks(chunks: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the numbers and the shape of each block."""
    blocks: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for lengths in chunks:
        blocks = [
            ((*numbers, number), (*shape, length))
            for numbers, shape in blocks
            for number, length in enumerate(lengths)
        ]
    return blocks


def _target_axes(target: GradientTarget) -> tuple[Axis, ...]:
    rows, columns = (AXES[axis] for axis in target.axes)
    heads: tuple[Axis, ...] = (KEY_HEADS if rows == -1 else -3, rows, columns)
    return aligned_axes(heads, len(target.shape))
