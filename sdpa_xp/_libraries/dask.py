"""Dask: lazy arrays in chunks, whose values are computed later, by tasks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import accumulate, product
from typing import Any, TypeVar, cast

import array_api_compat as compat

from .base import ASTYPE, ChunkedArrays, Library
from .protocols import Chunks, Dtype, Tasks

A = TypeVar("A")

MERGED_AT_ONCE = 8
"""States that a task merges, unless Dask's setting `split_every` says another number. A state is as large as
the output of its queries."""


class DaskGraphs(ChunkedArrays):
    """Arrays out of tasks, as layers of Dask's high-level graphs."""

    def in_chunks(self, array: Any, chunks: Chunks, _like: Any) -> Any:
        if compat.is_dask_array(array):
            return array.rechunk(chunks)
        # Each chunk is a separate piece of data, so that a worker gets its chunk and not the whole array.
        name = f"array-{self.token(without_repeats(array), chunks)}"
        stops = [[*accumulate(lengths)] for lengths in chunks]
        tasks = {}
        for place in product(*(range(len(lengths)) for lengths in chunks)):
            ends = [stops[axis][number] for axis, number in enumerate(place)]
            starts = [end - chunks[axis][place[axis]] for axis, end in enumerate(ends)]
            tasks[(name, *place)] = array[tuple(map(slice, starts, ends))]
        return import_module("dask.array").Array(
            tasks, name, chunks, dtype=array.dtype, meta=array[:0] if array.ndim else array
        )

    def as_lazy(self, array: Any, like: Any) -> Any:
        if compat.is_dask_array(array):
            return _without_empty_chunks(array)
        if not compat.is_numpy_array(array):
            return array
        return self.in_chunks(own_copy(array), tuple((n,) for n in array.shape), like)

    def token(self, *values: object) -> str:
        """Return a text that differs if a value does."""
        return str(import_module("dask.base").tokenize(*values))

    def merged_at_once(self) -> int:
        """Return how many results a task of a tree reduction merges."""
        split_every = import_module("dask").config.get("split_every", None)
        return max(2, split_every) if isinstance(split_every, int) else MERGED_AT_ONCE

    def array(
        self, stages: Mapping[str, Tasks], inputs: Sequence[Any], chunks: Chunks, dtype: Dtype, like: Any
    ) -> Any:
        """Return the array whose chunks the last of `stages` computes, each from earlier ones and `inputs`."""
        graphs = import_module("dask.highlevelgraph")
        before = {layer for array in inputs for layer in array.__dask_layers__()}
        graph = graphs.HighLevelGraph.merge(*(array.dask for array in inputs))
        layers, needs = dict(graph.layers), dict(graph.dependencies)
        for name, tasks in stages.items():
            layers[name], needs[name] = graphs.MaterializedLayer(tasks), set(before)
            before.add(name)
        *_, last = stages
        whole = graphs.HighLevelGraph(layers, needs)
        return import_module("dask.array").Array(whole, last, chunks, dtype=dtype, meta=like._meta)


class Dask(Library):
    name = "dask"
    conversion = "dask.array.from_array"
    chunks = DaskGraphs()
    cast_code = ASTYPE

    def is_traced(self, _array: Any) -> bool:
        return True

    def is_writeable(self, _array: Any) -> bool:
        return False

    def to_cpu(self, array: Any) -> Any:
        return compat.to_device(array.compute(), "cpu")  # chunks may be arrays of CuPy

    def to_list(self, array: Any) -> Any:
        return array.compute().tolist()

    def frozen(self, array: Any) -> Any:
        return array.copy()  # lazy, but its elements can be set, and `astype` would return it as it is

    def owns(self, array: object) -> bool:
        return bool(compat.is_dask_array(array))

    def unsupported_reason(self, array: Any) -> str:
        if type(array._meta).__name__ == "MaskedArray":
            hint = "The own mask of its chunks would be ignored: pass dask.array.ma.getdata(...) of it, and an "
            return f"{hint}`attn_mask` of what may attend."
        return ""

    def base_form(self, array: A) -> A:
        return cast(A, _without_empty_chunks(array))

    def known_values(self, array: Any) -> Any:
        if not compat.is_dask_array(array) or array.npartitions != 1:
            return array
        layer: Mapping[Any, Any] = array.dask.layers.get(array.name, {})
        task = layer.get((array.name, *[0] * array.ndim))
        chunk: Any = getattr(task, "value", task)  # Dask wraps data that it finds among tasks
        return chunk if compat.is_numpy_array(chunk) and chunk.shape == array.shape else array


def _without_empty_chunks(array: Any) -> Any:
    """Return the array without chunks of no elements: Dask reshapes, selects and adds them wrong."""
    if not any(0 in lengths and sum(lengths) for lengths in array.chunks):
        return array
    lengths_of_axes = (tuple(filter(None, lengths)) if sum(lengths) else (0,) for lengths in array.chunks)
    return array.rechunk(tuple(lengths_of_axes))


def without_repeats(array: Any) -> Any:
    """Return a view of an array of NumPy with one element along each axis that only repeats, (..., 1, ...)."""
    return array[tuple(slice(1) if stride == 0 else slice(None) for stride in array.strides)]


def own_copy(array: Any) -> Any:
    """Return a copy of an array of NumPy, so that a caller may write to theirs before values are computed.

    What repeats is not written out: a row that is broadcast to L x S stays as small as a row.
    """
    distinct = without_repeats(array).copy()
    is_whole = distinct.shape == array.shape
    return distinct if is_whole else sys.modules["numpy"].broadcast_to(distinct, array.shape)


DASK = Dask()
