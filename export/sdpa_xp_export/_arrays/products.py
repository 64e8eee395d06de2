"""Products of matrices and vectors, and sums of products over axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export._arrays.manipulation import axes_of, expand_dims, moveaxis, permute_dims, reshape, squeeze
from sdpa_xp_export._arrays.operators import array_function, computed, operands
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export._graph.lengths import Length, joint_shape

__all__ = ["matmul", "tensordot", "vecdot"]


@array_function
def matmul(one: GraphValue, other: GraphValue) -> GraphValue:
    """(..., M, K), (..., K, N) -> MatMul; a vector is a row on the left, and a column on the right."""
    one, other = operands("matmul", "numeric", one, other)
    if not one.ndim or not other.ndim:
        rule = "the operands of `matmul` must have axes"
        raise ArgumentValueError(
            one.graph.function, rule, {"first.shape": one.dims, "second.shape": other.dims}
        )
    left = one.dims[:-1]
    right = other.dims[-1:] if other.ndim > 1 else ()
    if one.dims[-1] != other.dims[-2 if other.ndim > 1 else -1]:
        rule = "the last axis of the first operand must be as long as the last but one of the second"
        got = {"first.shape": one.dims, "second.shape": other.dims}
        raise ArgumentValueError(one.graph.function, rule, got)
    if one.dims[-1] == 0 and one.elem_type == "uint64":  # for which onnxruntime fails
        rule = "`matmul` of uint64 must sum at least one product"
        got = {"first.shape": one.dims, "second.shape": other.dims}
        raise ArgumentValueError(one.graph.function, rule, got, "Convert both operands to int64.")
    batch = joint_shape(one.dims[:-2], other.dims[:-2])
    # onnxruntime folds a number that an operand of a MatMul is multiplied with into the MatMul, as a float32;
    # and before 1.26 it joins a Transpose and a MatMul of float64 to a node that has no kernel. It does
    # neither across Neg, so in float64 both operands are negated.
    if one.elem_type == "float64":
        one, other = -one, -other
    return computed("MatMul", one, other, shape=(*batch, *left[-1:], *right))


@array_function
def vecdot(one: GraphValue, other: GraphValue, *, axis: int = -1) -> GraphValue:
    """Sum the products along an axis, which both arrays have."""
    first, second = operands("vecdot", "numeric", one, other)
    if not -min(first.ndim, second.ndim) <= axis < 0:
        rule = "`axis` of `vecdot` must be negative, and an axis of both operands"
        got = {"axis": axis, "first.shape": first.dims, "second.shape": second.dims}
        raise ArgumentValueError(first.graph.function, rule, got)
    row = expand_dims(moveaxis(first, axis, -1), axis=-2)
    column = expand_dims(moveaxis(second, axis, -1), axis=-1)
    return squeeze(matmul(row, column), (-2, -1))


@array_function
def tensordot(
    one: GraphValue, other: GraphValue, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2
) -> GraphValue:
    """Sum the products over pairs of axes: the last of one and the first of the other, or those in `axes`."""
    first, second = operands("tensordot", "numeric", one, other)
    if isinstance(axes, int):
        axes = range(first.ndim - axes, first.ndim), range(axes)
    left, right = axes_of(first, tuple(axes[0])), axes_of(second, tuple(axes[1]))
    if [first.dims[axis] for axis in left] != [second.dims[axis] for axis in right]:
        rule = "the axes that `tensordot` sums over must have the same lengths"
        got = {"first.shape": first.dims, "second.shape": second.dims, "axes": axes}
        raise ArgumentValueError(first.graph.function, rule, got)
    rows = [axis for axis in range(first.ndim) if axis not in left]
    columns = [axis for axis in range(second.ndim) if axis not in right]
    row_shape, column_shape = (
        [x.shape[axis] for axis in free] for x, free in ((first, rows), (second, columns))
    )
    first = reshape(
        permute_dims(first, (*rows, *left)), (*row_shape, _merged([one.shape[axis] for axis in left]))
    )
    # The columns are joined after the summed axes, since a shape may have one length that is left open.
    second = permute_dims(second, (*right, *columns))
    second = reshape(second, (_merged([other.shape[axis] for axis in right]), *column_shape))
    second = reshape(second, (second.shape[0], _merged(column_shape)))
    first = first if rows else expand_dims(first, axis=0)
    return reshape(matmul(first, second), (*row_shape, *column_shape))


def _merged(lengths: Sequence[int | Length]) -> int | Length:
    """Return the length of axes that are joined; -1 if only Reshape knows it."""
    if any(isinstance(length, Length) for length in lengths):
        return lengths[0] if len(lengths) == 1 else -1
    return math.prod(length for length in lengths if isinstance(length, int))
