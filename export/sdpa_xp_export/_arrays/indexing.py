"""Elements at indices: `take`, `take_along_axis`, `nonzero`, `unstack`, and what `value[index]` writes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message

from .._dtypes.dtype import INTEGERS
from .._graph import Graph, GraphValue, Length, added, has_names, parts, plain
from . import ops
from .creation import arange
from .dispatch import array_function, is_array_elsewhere
from .elementwise import not_equal
from .manipulation import axis_of, broadcast_to, expand_dims, moveaxis, permute_dims, stack

__all__ = ["nonzero", "take", "take_along_axis", "unstack"]


@array_function
def take(value: GraphValue, indices: GraphValue, *, axis: int | None = None) -> GraphValue:
    """value, indices of any shape -> Gather; `axis` may be left out if there is just one."""
    index = _as_index(indices)
    if axis is None and value.ndim != 1:
        rule = "`axis` must be given if the array has more than one axis"
        raise ArgumentValueError(value.graph.function, rule, {"shape": value.dims})
    axis = axis_of(value, axis or 0)
    shape = (*value.dims[:axis], *index.dims, *value.dims[axis + 1 :])
    if index.dims == (0,):  # for which OpenVINO's Gather takes one element
        zero = value.graph.constant([0], "int64")
        return ops.cut(value, (zero, zero), axis, 0)
    return value.graph.add("Gather", value, index, dtype=value.elem_type, shape=shape, axis=axis)


@array_function
def take_along_axis(value: GraphValue, indices: GraphValue, *, axis: int = -1) -> GraphValue:
    """Return the elements at the indices along an axis, which differ with the other axes."""
    index, position = _as_index(indices), axis_of(value, axis)
    if index.ndim != value.ndim:
        rule = "`indices` must have as many axes as the array"
        raise ArgumentValueError(value.graph.function, rule, {"shape": value.dims, "indices.shape": index.dims})
    others = [(*x.dims[:position], 1, *x.dims[position + 1 :]) for x in (value, index)]
    shape = Length.in_shape(value.graph, value.graph.joint_shape(*others))
    value, index = (
        broadcast_to(x, (*shape[:position], x.shape[position], *shape[position + 1 :])) for x in (value, index)
    )
    return value.graph.add(
        "GatherElements", value, index, dtype=value.elem_type, shape=index.dims, axis=position
    )


def _as_index(indices: GraphValue) -> GraphValue:
    """Convert indices to a dtype that onnxruntime takes for them."""
    if indices.elem_type not in INTEGERS:
        rule = "`indices` must be integers"
        raise ArgumentTypeError(indices.graph.function, rule, {"indices.elem_type": indices.elem_type})
    return indices if indices.elem_type == "int32" else indices.astype("int64")


@array_function
def nonzero(value: GraphValue) -> tuple[GraphValue, ...]:
    """Return the indices of the elements that are not 0, an array for each axis."""
    if not value.ndim:
        rule = "`nonzero` needs an array with axes"
        raise ArgumentValueError(value.graph.function, rule, {"shape": value.dims})
    condition = value if value.elem_type == "bool" else not_equal(value, 0)
    count = condition.graph.lengths.fresh("nonzero", _unmoved(condition))
    indices = value.graph.add("NonZero", condition, dtype="int64", shape=(value.ndim, count))
    return tuple(take(indices, value.graph.constant(n, "int64"), axis=0) for n in range(value.ndim))


def _unmoved(value: GraphValue) -> str:
    """Return the name of the value whose elements, in some order, are those of `value`."""
    name = value.name
    for node in reversed(value.graph.written.nodes):
        if name in node.output and node.op_type in ("Reshape", "Squeeze", "Transpose", "Unsqueeze"):
            name = node.input[0]
    return name


def elements_at(value: GraphValue, arrays: Mapping[int, GraphValue], *, first: bool) -> GraphValue:
    """Return the elements at arrays of indices, by the axis that each of them indexes; they broadcast.

    Their axes take the place of those that are indexed, or come `first`.
    """
    axes = [*arrays]
    indices = [_as_index(array) for array in arrays.values()]
    if len(axes) == 1:
        return take(value, indices[0], axis=axes[0])
    shape = Length.in_shape(value.graph, value.graph.joint_shape(*(index.dims for index in indices)))
    index = stack([broadcast_to(index.astype("int64"), shape) for index in indices], axis=-1)
    others = [axis for axis in range(value.ndim) if axis not in axes]
    moved = permute_dims(value, (*axes, *others))
    dims = (*index.dims[:-1], *moved.dims[len(axes) :])
    elements = value.graph.add("GatherND", moved, index, dtype=value.elem_type, shape=dims)
    if first or not shape:
        return elements
    return moveaxis(elements, [*range(len(shape))], [axes[0] + number for number in range(len(shape))])


def item(value: GraphValue, index: object) -> GraphValue:
    """Write `value[index]` as NumPy reads it: integers, lengths, slices, None, an ellipsis, arrays, masks."""
    if isinstance(index, GraphValue) and index.elem_type == "bool" and not index.dims:
        value, index = expand_dims(value, axis=0), expand_dims(index, axis=0)  # all of the array, or nothing
    entries = _entries(value, index)
    axis, result = 0, value
    arrays: dict[int, GraphValue] = {}  # by the axis that they index
    places = []  # of the arrays among the entries: if other entries stand between them, their axes come first
    indexes_by_array = any(isinstance(entry, GraphValue) for entry in entries)
    for place, entry in enumerate(entries):
        if entry is None:
            result, axis = expand_dims(result, axis=axis), axis + 1
        elif isinstance(entry, slice):
            result, axis = _sliced(result, entry, axis), axis + 1
        elif indexes_by_array:
            arrays[axis] = entry if isinstance(entry, GraphValue) else _constant(result, entry, axis)
            places.append(place)
            axis += 1
        else:
            result = take(result, _constant(result, entry, axis), axis=axis)
    return elements_at(result, arrays, first=places[-1] - places[0] >= len(places)) if arrays else result


def _entries(value: GraphValue, index: object) -> list[Any]:
    """Return one entry for each axis, and None for each new one; a mask is the indices of its True elements."""
    entries: list[Any] = []
    for entry in index if isinstance(index, tuple) else (index,):
        if isinstance(entry, Length) or is_array_elsewhere(entry):
            entry = value.graph.operand(entry)
        if isinstance(entry, GraphValue) and entry.elem_type == "bool":
            before = sum(1 for one in entries if one is not None)
            entries += _indices_of(value, entry, None if ... in entries else before)
        else:
            entries.append(entry)
    counted = sum(1 for entry in entries if entry is not None and entry is not ...)
    rests = sum(1 for entry in entries if entry is ...)
    if counted > value.ndim or rests > 1:
        rule = "an index must have at most one ellipsis, and as many entries as the array has axes"
        got = {"entries": counted, "ellipses": rests, "shape": value.dims}
        raise IndexError(Message(value.graph.function, rule, got))
    end = next((place for place, entry in enumerate(entries) if entry is ...), len(entries))
    return [*entries[:end], *[slice(None)] * (value.ndim - counted), *entries[end + 1 :]]


def _indices_of(value: GraphValue, mask: GraphValue, axis: int | None) -> tuple[GraphValue, ...]:
    """Return the indices of the True elements of a mask, which begins at `axis` if that is known."""
    masked = mask.dims if axis is None else value.dims[axis : axis + mask.ndim]
    if not mask.ndim or mask.graph.loose(mask.dims) != mask.graph.loose(masked):
        rule = "a mask must have the lengths of the axes that it indexes"
        got = {"mask.shape": mask.dims, "shape": value.dims}
        raise IndexError(Message(value.graph.function, rule, got))
    return nonzero(mask)


def _constant(value: GraphValue, index: Any, axis: int) -> GraphValue:
    """Return an integer of the caller as an index."""
    try:
        if isinstance(index, bool):  # NumPy would add an axis, where `operator.index` gives 0 or 1
            raise TypeError
        number = operator.index(index)
    except TypeError as error:
        rule = "an index must be made of integers, lengths, slices, None, an ellipsis, and arrays"
        got: dict[str, object] = {"index": type(index).__name__}
        hint = "Write xp = x.__array_namespace__(), and xp.asarray([0, 2]) for a list."
        raise ArgumentTypeError(value.graph.function, rule, got, hint) from error
    length = value.dims[axis]
    if isinstance(length, int) and not -length <= number < length:
        rule, got = "an index must be within its axis", {"index": number, "length": length}
        raise IndexError(Message(value.graph.function, rule, got))
    return value.graph.constant(number, "int64")


def _sliced(value: GraphValue, part: slice, axis: int) -> GraphValue:
    if isinstance(part.start, GraphValue) or isinstance(part.stop, GraphValue):
        rule = "the bounds of a slice must be integers or lengths"
        hint = "Write xp = x.__array_namespace__(), and xp.take(x, xp.arange(stop), axis=0) for x[:stop]."
        raise ArgumentTypeError(value.graph.function, rule, {"start": part.start, "stop": part.stop}, hint)
    if (part.start, part.stop, part.step) == (None, None, None):
        return value
    length, step = value.dims[axis], 1 if part.step is None else part.step
    start, stop = plain(part.start), plain(part.stop)
    if value.graph.runtime.is_openvino and isinstance(start, str) and step == 1:
        # OpenVINO 2026.4 takes the length of a Slice with a computed start for that of its input.
        value = _sliced(value, slice(part.stop), axis)
        return take(value, arange(part.start, value.shape[axis]), axis=axis)
    bounds = [_bound(value, start, 0 if step > 0 else 2**62)]  # Slice cuts a bound off at the end of the axis
    bounds.append(_bound(value, stop, 2**62 if step > 0 else -(2**62)))
    new = _length_of(value.graph, length, start, stop, step)
    axes, steps = (value.graph.constant([number], "int64") for number in (axis, step))
    shape = (*value.dims[:axis], new, *value.dims[axis + 1 :])
    return value.graph.add("Slice", value, *bounds, axes, steps, dtype=value.elem_type, shape=shape)


def _length_of(graph: Graph, length: int | str, start: Any, stop: Any, step: int) -> int | str:
    """Return how many entries a slice has, or a name for that; slices that are known to be alike share it."""
    if isinstance(length, int) and not has_names([start, stop]):
        return len(range(length)[start:stop:step])
    if (start, stop, step) == (None, None, -1):
        return length
    names, name, start = graph.lengths, graph.lengths.fresh(length, start, stop, step), start or 0
    first, axis = names.terms(start), names.terms(length)
    if (start, stop) in ((0, 1), (-1, None)) or (stop is None and added(axis, first, -1) == {(): 1}):
        return 1
    if step < 0 or (isinstance(start, int) and start < 0) or (isinstance(stop, int) and stop > 0):
        if step == 1 and (start == 0 or stop is None):
            names.heads[name] = str(names.counted(added(axis, {(): stop or -start}, -1), 1)), axis
        return name  # a bound may be beyond the axis
    if stop == 0:
        return 0
    end = names.terms(stop) if isinstance(stop, str) else added(axis, names.terms(stop or 0))
    count, behind = names.counted(added(end, first, -1), step), added(axis, end, -1)
    is_beyond = isinstance(stop, str) and behind != {(): 1} and (parts(end)[1] or (start and parts(behind)[1]))
    if is_beyond or parts(first)[1]:
        names.computed[name] = "like", str(count), 0
    return name if name in names.computed else count


def _bound(value: GraphValue, bound: Any, default: int) -> GraphValue:
    if isinstance(bound, str):
        return value.graph.length(bound)
    return value.graph.constant([default if bound is None else operator.index(bound)], "int64")


@array_function
def unstack(value: GraphValue, *, axis: int = 0) -> tuple[GraphValue, ...]:
    """value -> its entries along an axis, whose length must be known."""
    position = axis_of(value, axis)
    count, before = value.dims[position], (slice(None),) * position
    if isinstance(count, str):
        rule = "`unstack` must be along an axis whose length is known"
        raise ArgumentTypeError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
    return tuple(item(value, (*before, index)) for index in range(count))
