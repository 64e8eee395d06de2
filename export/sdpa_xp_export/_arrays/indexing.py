"""The functions that choose elements of values: `value[index]`, `take` and `unstack`."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any, cast

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message
from sdpa_xp_export._arrays.manipulation import axis_of, expand_dims
from sdpa_xp_export._arrays.operators import array_function
from sdpa_xp_export._dtypes.dtype import INTEGERS
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._graph.lengths import Length, has_names, joined_name, plain
from sdpa_xp_export._graph.traced_graph import name_length, traced_graph_of

__all__ = ["take", "unstack"]


def item(value: GraphValue, index: object) -> GraphValue:
    """Write `value[index]` for an index of integers, slices, None and an ellipsis."""
    entries = index if isinstance(index, tuple) else (index,)
    counted = sum(1 for entry in entries if entry is not None and entry is not ...)
    rests = sum(1 for entry in entries if entry is ...)
    if counted > value.ndim or rests > 1:
        rule = "an index must have at most one ellipsis, and as many entries as the array has axes"
        got = {"entries": counted, "ellipses": rests, "shape": value.dims}
        raise IndexError(Message(value.graph.function, rule, got))
    if not rests:
        entries = (*entries, ...)
    axis, result = 0, value
    for entry in entries:
        if entry is ...:
            axis += value.ndim - counted
        elif entry is None:
            result, axis = expand_dims(result, axis=axis), axis + 1
        elif isinstance(entry, slice):
            result, axis = _sliced(result, entry, axis), axis + 1
        else:
            result = _entry(result, entry, axis)
    return result


def _entry(value: GraphValue, index: Any, axis: int) -> GraphValue:
    try:
        if isinstance(index, bool):  # NumPy would add an axis, where `operator.index` gives 0 or 1
            raise TypeError
        number = operator.index(index)
    except TypeError as error:
        rule = "an index must be made of integers, slices, None and an ellipsis"
        got: dict[str, object] = {"index": type(index).__name__}
        raise ArgumentTypeError(value.graph.function, rule, got, "For other indices, use `take`.") from error
    length = value.dims[axis]
    if isinstance(length, int) and not -length <= number < length:
        rule, got = "an index must be within its axis", {"index": number, "length": length}
        raise IndexError(Message(value.graph.function, rule, got))
    return take(value, value.graph.constant(number, "int64"), axis=axis)


def _sliced(value: GraphValue, part: slice, axis: int) -> GraphValue:
    if (part.start, part.stop, part.step) == (None, None, None):
        return value
    length, step = value.dims[axis], 1 if part.step is None else part.step
    start, stop = plain(part.start), plain(part.stop)
    bounds = [_bound(value, start, 0 if step > 0 else 2**62)]  # Slice cuts a bound off at the end of the axis
    bounds.append(_bound(value, stop, 2**62 if step > 0 else -(2**62)))
    new = _length_of(value.graph, length, start, stop, step)
    axes, steps = (value.graph.constant([number], "int64") for number in (axis, step))
    shape = (*value.dims[:axis], new, *value.dims[axis + 1 :])
    sliced = value.graph.add("Slice", value, *bounds, axes, steps, dtype=value.elem_type, shape=shape)
    return name_length(sliced, axis, new)


def _length_of(graph: Graph, length: int | str, start: Any, stop: Any, step: int) -> int | str:
    """Return how many entries a slice has, or a name for that; slices that are known to be alike share it."""
    if isinstance(length, int) and not has_names([start, stop]):
        return len(range(length)[start:stop:step])
    if isinstance(length, str) and isinstance(start, str) and step == 1 and stop is None:
        with suppress(TypeError):  # the start may be no part of the length
            return cast("int | str", plain(Length(graph, length) - Length(graph, start)))
    if start in (None, 0) and step == 1 and (stop == 1 or isinstance(stop, str)):
        return 1 if stop == 1 else stop
    if (start, stop, step) in ((None, None, -1), (-1, None, 1)):
        return length if step == -1 else 1
    front, behind = start or 0, stop or 0
    if step == 1 and isinstance(front, int) and isinstance(behind, int) and front >= 0 >= behind:
        return joined_name(length, "less", front - behind)
    return joined_name(length, start, stop, step)


def _bound(value: GraphValue, bound: Any, default: int) -> GraphValue:
    if isinstance(bound, str):
        return traced_graph_of(value).length(bound)
    return value.graph.constant([default if bound is None else operator.index(bound)], "int64")


@array_function
def take(value: GraphValue, indices: GraphValue, *, axis: int | None = None) -> GraphValue:
    """value, indices of any shape -> Gather; `axis` may be left out if there is just one."""
    if indices.elem_type not in INTEGERS:
        rule = "`indices` must be integers"
        raise ArgumentTypeError(value.graph.function, rule, {"indices.elem_type": indices.elem_type})
    if axis is None and value.ndim != 1:
        rule = "`axis` must be given if the array has more than one axis"
        raise ArgumentValueError(value.graph.function, rule, {"shape": value.dims})
    index = indices if indices.elem_type == "int32" else indices.astype("int64")  # Gather takes these two alone
    axis = axis_of(value, axis or 0)
    shape = (*value.dims[:axis], *index.dims, *value.dims[axis + 1 :])
    return value.graph.add("Gather", value, index, dtype=value.elem_type, shape=shape, axis=axis)


@array_function
def unstack(value: GraphValue, *, axis: int = 0) -> tuple[GraphValue, ...]:
    """value -> its entries along an axis, whose length must be known."""
    position = axis_of(value, axis)
    count, before = value.dims[position], (slice(None),) * position
    if isinstance(count, str):
        rule = "`unstack` must be along an axis whose length is known"
        raise ArgumentTypeError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
    return tuple(item(value, (*before, index)) for index in range(count))
