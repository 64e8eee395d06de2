"""Functions that take elements at indices that are values: `take`, `take_along_axis`, `nonzero`."""

from __future__ import annotations

from collections.abc import Mapping

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp_export._arrays import ops
from sdpa_xp_export._arrays.elementwise import not_equal
from sdpa_xp_export._arrays.manipulation import axis_of, broadcast_to, moveaxis, permute_dims, stack
from sdpa_xp_export._arrays.operators import array_function
from sdpa_xp_export._dtypes.dtype import INTEGERS
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export._graph.lengths import Length
from sdpa_xp_export._graph.terms import joined_name

__all__ = ["nonzero", "take", "take_along_axis"]


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
    count = joined_name("nonzero", _unmoved(condition))
    indices = value.graph.add("NonZero", condition, dtype="int64", shape=(value.ndim, count))
    return tuple(take(indices, value.graph.constant(n, "int64"), axis=0) for n in range(value.ndim))


def _unmoved(value: GraphValue) -> str:
    """Return the name of the value whose elements, in some order, are those of `value`."""
    name = value.name
    for node in reversed(value.graph.nodes):
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
