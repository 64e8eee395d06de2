"""Operators of ONNX that the array API has no function for. Each docstring gives the inputs and the outputs."""

from __future__ import annotations

from .._graph import GraphValue
from .manipulation import concat, expand_dims, permute_dims, reshape, squeeze


def scalar(value: GraphValue) -> GraphValue:
    """(1,) -> ()."""
    return squeeze(value, 0)


def to_rank(value: GraphValue, rank: int) -> GraphValue:
    """value -> value with axes of length 1 in front, up to `rank` axes."""
    while value.ndim < rank:
        value = expand_dims(value, axis=0)
    return value


def squeeze_front(value: GraphValue, rank: int) -> GraphValue:
    """value -> value without its first axes, which are of length 1, down to `rank` axes."""
    return value if value.ndim <= rank else squeeze(value, range(value.ndim - rank))


def with_ones(value: GraphValue, count: int) -> GraphValue:
    """value (...) -> (..., 1, 1), with `count` axes of length 1 behind the others."""
    ones = [1] * count
    return reshape(value, [*[0] * value.ndim, *ones], dims=(*value.dims, *ones))


def swap(value: GraphValue, one: int, other: int) -> GraphValue:
    """value -> value with two axes swapped."""
    perm = [*range(value.ndim)]
    perm[one], perm[other] = perm[other], perm[one]
    return permute_dims(value, perm)


def cut(value: GraphValue, bounds: tuple[GraphValue, GraphValue], axis: int, length: int | str) -> GraphValue:
    """value -> its entries along `axis` from the first bound up to the second, which is left out."""
    axes, shape = value.graph.constant([axis], "int64"), [*value.dims]
    shape[axis] = length
    return value.graph.add("Slice", value, *bounds, axes, dtype=value.elem_type, shape=tuple(shape))


def reverse(value: GraphValue) -> GraphValue:
    """value -> its entries along the first axis, the last one first."""
    start, stop, axis, step = (value.graph.constant([number], "int64") for number in (-1, -(2**63) + 1, 0, -1))
    return value.graph.add("Slice", value, start, stop, axis, step, dtype=value.elem_type, shape=value.dims)


def shape_of(value: GraphValue) -> GraphValue:
    """value -> its lengths, (ndim,)."""
    return value.graph.add("Shape", value, dtype="int64", shape=(value.ndim,))


def length_of(value: GraphValue, axis: int) -> GraphValue:
    """value -> its length along an axis that is counted from the front, (1,)."""
    return value.graph.add("Shape", value, dtype="int64", shape=(1,), start=axis, end=axis + 1)


def reduce(op: str, value: GraphValue, axis: int = -1) -> GraphValue:
    """value -> op over `axis`, which stays with a length of 1."""
    shape = [*value.dims]
    shape[axis] = 1
    dtype, reduced = value.elem_type, tuple(shape)
    # The axis is an input of ReduceSum since opset 13, of the other reductions since 18; before, an attribute.
    if op != "ReduceSum" and value.graph.settings.opset < 18:
        return value.graph.add(op, value, dtype=dtype, shape=reduced, axes=[axis], keepdims=1)
    axes = value.graph.constant([axis], "int64")
    return value.graph.add(op, value, axes, dtype=dtype, shape=reduced, keepdims=1)


def ones_column(value: GraphValue) -> GraphValue:
    """value (..., N) -> ones (N, 1), by which a MatMul sums its last axis.

    Shape -> Expand. A ReduceSum would give the wrong shape in onnxruntime if there is no element.
    """
    graph, last = value.graph, value.ndim - 1
    target = concat([length_of(value, last), graph.constant([1], "int64")])
    one = graph.constant([[1]], value.elem_type)
    return graph.add("Expand", one, target, dtype=value.elem_type, shape=(value.dims[last], 1))
