"""The functions of the array API that give values another shape, or join them.

Where only the caller knows the shape of the result, as in the body of a loop, `dims` says it. The lengths
themselves are then a value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from sdpa_xp.errors import ArgumentValueError

from .._graph import GraphValue, Length, broadcasts_to, has_names, plain
from ..spec import SymbolicShape, as_lengths
from .dispatch import array_function, kernel_dtype, promoted

__all__ = ["broadcast_to", "concat", "expand_dims", "matrix_transpose", "moveaxis", "permute_dims", "reshape"]
__all__ += ["squeeze", "stack"]

Axes = int | Sequence[int] | None


def axis_of(value: GraphValue, axis: int, added: int = 0) -> int:
    """Count `axis` from the front, for a value that gets `added` more axes."""
    count, number = value.ndim + added, operator.index(axis)
    if not -count <= number < count:
        rule = f"`axis` must be one of {count} axes"
        raise ArgumentValueError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
    return number % count


def axes_of(value: GraphValue, axes: Axes, added: int = 0) -> tuple[int, ...]:
    """Count several axes from the front, for a value that gets `added` more; None means all of them."""
    if axes is None:
        return tuple(range(value.ndim))
    counted = tuple(axis_of(value, axis, added) for axis in (axes if isinstance(axes, Sequence) else (axes,)))
    if len({*counted}) < len(counted):
        rule = "`axis` must name each axis once"
        raise ArgumentValueError(value.graph.function, rule, {"axis": axes, "shape": value.dims})
    return counted


@array_function
def reshape(
    value: GraphValue, shape: Any, *, copy: object = None, dims: SymbolicShape | None = None
) -> GraphValue:
    """value -> Reshape; one length may be -1, which is what is left.

    Args:
        value: The value.
        shape: The lengths. With `dims`, they are written as they are, and 0 keeps a length; or a value of them.
        copy: Ignored, since a value has no memory.
        dims: The resulting shape.
    """
    del copy
    if dims is not None:
        return _reshaped(value, shape, dims)
    shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    shape = tuple(plain(n) if isinstance(n, Length) else operator.index(n) for n in shape)
    left = [axis for axis, length in enumerate(shape) if length == -1]
    if left and 0 in shape:
        rule = "`shape` must not have -1 beside a length of 0, which leaves it open"
        raise ArgumentValueError(value.graph.function, rule, {"x.shape": value.dims, "shape": shape})
    stated = list(shape)
    for axis in left:
        others = tuple(length for length in shape if length != -1)
        stated[axis] = value.graph.lengths.remaining(value.dims, others)
    if tuple(stated) == value.dims:
        return value
    # A length that stays where it is needs not be read: in the target of Reshape 0 stands for it. Any other one
    # may be 0 in a run; then no length stands for another.
    lengths = [0 if value.dims[axis : axis + 1] == (length,) else length for axis, length in enumerate(shape)]
    attributes = {}
    if 0 in shape or (has_names(lengths) and all(map(value.graph.lengths.knows, stated))):
        lengths, attributes = stated, {"allowzero": 1}
    if has_names(lengths):
        target = concat([value.graph.length(length) for length in lengths])
    else:
        target = value.graph.constant(lengths, "int64")
    return value.graph.add("Reshape", value, target, dtype=value.elem_type, shape=tuple(stated), **attributes)


def _reshaped(value: GraphValue, target: GraphValue | Sequence[int], dims: SymbolicShape) -> GraphValue:
    if not isinstance(target, GraphValue):
        if value.dims == dims:  # a target that is a value may move elements between axes of equal names
            return value
        target = value.graph.constant([*target], "int64")
    return value.graph.add("Reshape", value, target, dtype=value.elem_type, shape=dims)


@array_function
def permute_dims(value: GraphValue, axes: Sequence[int]) -> GraphValue:
    """value -> Transpose."""
    perm = axes_of(value, axes)
    if len(perm) != value.ndim:
        rule = "`axes` must name each axis"
        raise ArgumentValueError(value.graph.function, rule, {"axes": axes, "shape": value.dims})
    shape = tuple(value.dims[axis] for axis in perm)
    if perm == (*range(value.ndim),):  # also without axes, for which the attribute would have no type
        return value
    return value.graph.add("Transpose", value, dtype=value.elem_type, shape=shape, perm=[*perm])


@array_function
def matrix_transpose(value: GraphValue) -> GraphValue:
    """(..., M, N) -> (..., N, M)."""
    if value.ndim < 2:
        rule = "`matrix_transpose` needs at least two axes"
        raise ArgumentValueError(value.graph.function, rule, {"shape": value.dims})
    return permute_dims(value, (*range(value.ndim - 2), -1, -2))


@array_function
def moveaxis(value: GraphValue, source: int | Sequence[int], destination: int | Sequence[int]) -> GraphValue:
    """value -> Transpose."""
    sources, destinations = axes_of(value, source), axes_of(value, destination)
    if len(sources) != len(destinations):
        rule = "`source` and `destination` must have the same number of axes"
        got = {"source": source, "destination": destination}
        raise ArgumentValueError(value.graph.function, rule, got)
    axes = [axis for axis in range(value.ndim) if axis not in sources]
    for to, axis in sorted(zip(destinations, sources, strict=True)):
        axes.insert(to, axis)
    return permute_dims(value, axes)


@array_function
def expand_dims(value: GraphValue, axis: int | Sequence[int] = 0) -> GraphValue:
    """value -> Unsqueeze."""
    if isinstance(axis, Sequence):
        for position in sorted(axes_of(value, axis, len(axis))):
            value = expand_dims(value, axis=position)
        return value
    # The axis stands in the graph as the caller counts it: then values of other ranks share the constant.
    position, axes = axis_of(value, axis, 1), value.graph.constant([axis], "int64")
    shape = (*value.dims[:position], 1, *value.dims[position:])
    return value.graph.add("Unsqueeze", value, axes, dtype=value.elem_type, shape=shape)


@array_function
def squeeze(value: GraphValue, axis: int | Sequence[int]) -> GraphValue:
    """value -> Squeeze of axes of length 1."""
    axes = axes_of(value, axis)
    if any(isinstance(value.dims[one], int) and value.dims[one] != 1 for one in axes):
        rule = "`axis` must name axes of length 1"
        raise ArgumentValueError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
    shape = tuple(length for axis, length in enumerate(value.dims) if axis not in axes)
    removed = value.graph.constant(sorted(axes), "int64")
    return value.graph.add("Squeeze", value, removed, dtype=value.elem_type, shape=shape)


@array_function
def broadcast_to(value: GraphValue, shape: Any, *, dims: SymbolicShape | None = None) -> GraphValue:
    """value -> Expand; with `dims`, the shape that results, `shape` is a value of the lengths."""
    target = tuple(map(plain, shape)) if dims is None else value.graph.joint_shape(value.dims, dims)
    if not broadcasts_to(value.graph.loose(value.dims), value.graph.loose(target)):
        rule = "`x` must broadcast to `shape`"
        raise ArgumentValueError(value.graph.function, rule, {"x.shape": value.dims, "shape": target})
    if value.dims == target:
        return value
    if dims is not None:
        lengths = shape
    elif has_names(target):
        lengths = concat([value.graph.length(length) for length in target])
    elif 0 in target:  # onnxruntime takes an Expand from 1 to 0 for one that does nothing
        return value.graph.constant(np.zeros(as_lengths(target)), value.elem_type)
    else:
        lengths = value.graph.constant([*target], "int64")
    inner = kernel_dtype("Expand", value)  # the CPU has no Expand of bfloat16
    expanded = value.graph.add("Expand", value.astype(inner), lengths, dtype=inner, shape=target)
    return expanded.astype(value.elem_type)


@array_function
def concat(values: Sequence[GraphValue], *, axis: int | None = 0) -> GraphValue:
    """values -> Concat, flattened for no axis; a length that is joined is a sum."""
    one, *others = values
    for other in others:
        one, other = promoted("concat", one, other)
    values = [value.astype(one.elem_type) for value in values]
    if axis is None:
        values, axis = [reshape(value, (-1,)) for value in values], 0
    first, position = values[0], axis_of(values[0], axis)
    _check_alike(values, position)
    length = first.graph.lengths.joined(*(value.dims[position] for value in values))
    shape = (*first.dims[:position], length, *first.dims[position + 1 :])
    joined = first.graph.add("Concat", *values, dtype=first.elem_type, shape=shape, axis=position)
    if len(values) == 2 and not joined.graph.is_part:  # attention may take a cache apart again
        joined.graph.concatenated[joined.name] = position - joined.ndim, values[0], values[1]
    return joined


def _check_alike(values: Sequence[GraphValue], axis: int | None) -> None:
    """Check that all values have the same lengths, as far as these are known, except along `axis`."""
    ranks = {value.ndim for value in values}
    others = [position for position in range(min(ranks)) if position != axis]
    known = [{n for value in values if isinstance(n := value.dims[position], int)} for position in others]
    if len(ranks) > 1 or any(len(lengths) > 1 for lengths in known):
        rule = "arrays that are joined must have the same shape" + ", except along `axis`" * (axis is not None)
        got = {"shapes": ", ".join(str(value.dims) for value in values)}
        raise ArgumentValueError(values[0].graph.function, rule, got)


@array_function
def stack(values: Sequence[GraphValue], *, axis: int = 0) -> GraphValue:
    """values -> Unsqueeze, Concat."""
    _check_alike(values, None)
    position = axis_of(values[0], axis, 1)
    return concat([expand_dims(value, axis=position) for value in values], axis=position)
