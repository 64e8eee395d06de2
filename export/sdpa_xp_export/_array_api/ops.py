"""Operators that move, join and reduce elements. The caller passes a shape that only a run can compute.

The functions of the array API use these operators, and so do the forms and the lowering. Each docstring gives
the inputs and the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdpa_xp_export._array_api.operators import computed, kernel_dtype
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export._graph.shapes import joint_shape
from sdpa_xp_export.spec import SymbolicShape


def scalar(value: GraphValue) -> GraphValue:
    """(1,) -> ()."""
    return value.graph.add(
        "Squeeze", value, value.graph.constant([0], "int64"), dtype=value.elem_type, shape=()
    )


def arange(stop: GraphValue, length: int | str, start: GraphValue | None = None) -> GraphValue:
    """Scalars -> start, start + 1, ... stop - 1, which are `length` numbers; without a start from 0."""
    zero, one = (stop.graph.constant(number, "int64") for number in (0, 1))
    return stop.graph.add("Range", zero if start is None else start, stop, one, dtype="int64", shape=(length,))


def join(values: Sequence[GraphValue], axis: int = 0, length: int | str | None = None) -> GraphValue:
    """Several values -> Concat along `axis`, which then has `length`."""
    first = values[0]
    shape: list[int | str] = list(first.dims)
    shape[axis] = len(values) if length is None else length
    return first.graph.add("Concat", *values, dtype=first.elem_type, shape=tuple(shape), axis=axis)


def unsqueeze(value: GraphValue, axis: int) -> GraphValue:
    """value -> value with a new axis of length 1 at `axis`."""
    shape = list(value.dims)
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 1)
    axes = value.graph.constant([axis], "int64")
    return value.graph.add("Unsqueeze", value, axes, dtype=value.elem_type, shape=tuple(shape))


def to_rank(value: GraphValue, rank: int) -> GraphValue:
    """value -> value with axes of length 1 in front, up to `rank` axes."""
    while value.ndim < rank:
        value = unsqueeze(value, 0)
    return value


def squeeze(value: GraphValue, axes: Sequence[int]) -> GraphValue:
    """value -> value without these axes of length 1, which are counted from the front."""
    shape = tuple(length for axis, length in enumerate(value.dims) if axis not in axes)
    removed = value.graph.constant(sorted(axes), "int64")
    return value.graph.add("Squeeze", value, removed, dtype=value.elem_type, shape=shape)


def squeeze_front(value: GraphValue, rank: int) -> GraphValue:
    """value -> value without its first axes, which are of length 1, down to `rank` axes."""
    if value.ndim <= rank:
        return value
    return squeeze(value, range(value.ndim - rank))


def reshape(value: GraphValue, target: Sequence[int], shape: SymbolicShape) -> GraphValue:
    """value -> value of `shape`; in `target`, 0 keeps a length and -1 is what is left."""
    if value.dims == shape:
        return value
    return reshape_to(value, value.graph.constant(list(target), "int64"), shape)


def reshape_to(value: GraphValue, target: GraphValue, shape: SymbolicShape, **attributes: int) -> GraphValue:
    """value, lengths -> value of these lengths."""
    return value.graph.add("Reshape", value, target, dtype=value.elem_type, shape=shape, **attributes)


def with_ones(value: GraphValue, count: int) -> GraphValue:
    """value (...) -> (..., 1, 1), with `count` axes of length 1 behind the others."""
    ones = [1] * count
    return reshape(value, [*[0] * value.ndim, *ones], (*value.dims, *ones))


def expand(value: GraphValue, target: GraphValue, shape: SymbolicShape) -> GraphValue:
    """value, lengths -> value that is broadcast to these lengths."""
    joint = joint_shape(value.dims, shape)
    if value.dims == joint:
        return value
    inner = kernel_dtype("Expand", value)
    expanded = value.graph.add("Expand", value.astype(inner), target, dtype=inner, shape=joint)
    return expanded.astype(value.elem_type)


def permute(value: GraphValue, perm: Sequence[int]) -> GraphValue:
    """value -> value with its axes in another order."""
    shape = tuple(value.dims[axis] for axis in perm)
    return value.graph.add("Transpose", value, dtype=value.elem_type, shape=shape, perm=list(perm))


def swap(value: GraphValue, one: int, other: int) -> GraphValue:
    """value -> value with two axes swapped."""
    perm = list(range(value.ndim))
    perm[one], perm[other] = perm[other], perm[one]
    return permute(value, perm)


def transpose(value: GraphValue) -> GraphValue:
    """(..., S, E) -> (..., E, S)."""
    return swap(value, -1, -2)


def product(one: GraphValue, other: GraphValue, shape: SymbolicShape) -> GraphValue:
    """one, other -> MatMul of `shape`."""
    # onnxruntime folds a number that an operand of a MatMul is multiplied with into the MatMul, as a float32;
    # and before 1.26 it joins a Transpose and a MatMul of float64 to a node that has no kernel. It does
    # neither across Neg, so in float64 both operands are negated.
    if one.elem_type == "float64":
        one, other = -one, -other
    return computed("MatMul", one, other, shape=shape)


def cut(value: GraphValue, bounds: tuple[GraphValue, GraphValue], axis: int, length: int | str) -> GraphValue:
    """value -> its entries along `axis` from the first bound up to the second, which is left out."""
    axes, shape = value.graph.constant([axis], "int64"), list(value.dims)
    shape[axis] = length
    return value.graph.add("Slice", value, *bounds, axes, dtype=value.elem_type, shape=tuple(shape))


def reverse(value: GraphValue) -> GraphValue:
    """value -> its entries along the first axis, the last one first."""
    start, stop, axis, step = (value.graph.constant([number], "int64") for number in (-1, -(2**63) + 1, 0, -1))
    return value.graph.add("Slice", value, start, stop, axis, step, dtype=value.elem_type, shape=value.dims)


def gather(value: GraphValue, index: GraphValue, axis: int) -> GraphValue:
    """value, indices -> the entries of value at these indices along `axis`."""
    shape = (*value.dims[:axis], *index.dims, *value.dims[axis + 1 :])
    return value.graph.add("Gather", value, index, dtype=value.elem_type, shape=shape, axis=axis)


def length_of(value: GraphValue, axis: int) -> GraphValue:
    """value -> its length along an axis that is counted from the front, (1,)."""
    return value.graph.add("Shape", value, dtype="int64", shape=(1,), start=axis, end=axis + 1)


def reduce(op: str, value: GraphValue, axis: int = -1) -> GraphValue:
    """value -> op over `axis`, which stays with a length of 1."""
    shape = list(value.dims)
    shape[axis] = 1
    dtype, reduced = value.elem_type, tuple(shape)
    # The axis is an input of ReduceSum since opset 13, of the other reductions since 18; before, an attribute.
    if op != "ReduceSum" and value.graph.opset < 18:
        return value.graph.add(op, value, dtype=dtype, shape=reduced, axes=[axis], keepdims=1)
    axes = value.graph.constant([axis], "int64")
    return value.graph.add(op, value, axes, dtype=dtype, shape=reduced, keepdims=1)


def ones_column(value: GraphValue) -> GraphValue:
    """value (..., N) -> ones (N, 1), by which a MatMul sums its last axis.

    Shape -> Expand. A ReduceSum would give the wrong shape in onnxruntime if there is no element.
    """
    graph, last = value.graph, value.ndim - 1
    target = join([length_of(value, last), graph.constant([1], "int64")])
    one = graph.constant([[1]], value.elem_type)
    return graph.add("Expand", one, target, dtype=value.elem_type, shape=(value.dims[last], 1))
