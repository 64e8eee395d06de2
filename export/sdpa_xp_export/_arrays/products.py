"""Products of matrices and vectors, and sums of products over axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdpa_xp.errors import ArgumentValueError

from .._graph import GraphValue
from . import ops
from .dispatch import array_function, computed, operands
from .elementwise import equal, where
from .manipulation import axes_of, expand_dims, moveaxis, permute_dims, reshape, squeeze

__all__ = ["matmul", "tensordot", "vecdot"]


@array_function
def matmul(one: GraphValue, other: GraphValue) -> GraphValue:
    """(..., M, K), (..., K, N) -> MatMul; a vector is a row on the left, and a column on the right."""
    one, other = operands("matmul", "numeric", one, other)
    got = {"first.shape": one.dims, "second.shape": other.dims}
    if not one.ndim or not other.ndim:
        rule = "the operands of `matmul` must have axes"
        raise ArgumentValueError(one.graph.function, rule, got)
    left = one.dims[:-1]
    right = other.dims[-1:] if other.ndim > 1 else ()
    rows = other.dims[-2:-1] if other.ndim > 1 else other.dims
    if one.graph.loose(one.dims[-1:]) != one.graph.loose(rows):
        rule = "the last axis of the first operand must be as long as the last but one of the second"
        raise ArgumentValueError(one.graph.function, rule, got)
    if one.dims[-1] == 0 and one.elem_type == "uint64":  # for which onnxruntime fails
        rule = "`matmul` of uint64 must sum at least one product"
        raise ArgumentValueError(one.graph.function, rule, got, "Convert both operands to int64.")
    batch = one.graph.joint_shape(one.dims[:-2], other.dims[:-2])
    # onnxruntime folds a number that an operand of a MatMul is multiplied with into the MatMul, as a float32;
    # and before 1.26 it joins a Transpose and a MatMul of float64 to a node that has no kernel. It does
    # neither across Neg, so in float64 both operands are negated.
    if one.elem_type == "float64":
        one, other = -one, -other
    product = computed("MatMul", one, other, shape=(*batch, *left[-1:], *right))
    is_known = isinstance(one.dims[-1], int) and one.dims[-1] > 0
    if is_known or max(one.ndim, other.ndim) < 3 or one.graph.is_part:
        return product
    # Where there is nothing to sum, onnxruntime 1.31 sets one matrix of a batch to 0, and no other one.
    is_empty = equal(ops.length_of(one, one.ndim - 1), 0)
    return where(is_empty, one.graph.constant(0, product.elem_type), product)


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
    fits = first.graph.loose([first.dims[axis] for axis in left])
    if fits != second.graph.loose([second.dims[axis] for axis in right]):
        rule = "the axes that `tensordot` sums over must have the same lengths"
        got = {"first.shape": first.dims, "second.shape": second.dims, "axes": axes}
        raise ArgumentValueError(first.graph.function, rule, got)
    rows = [axis for axis in range(first.ndim) if axis not in left]
    columns = [axis for axis in range(second.ndim) if axis not in right]
    row_shape, column_shape = (
        [x.shape[axis] for axis in free] for x, free in ((first, rows), (second, columns))
    )
    first_sum, second_sum = (
        math.prod(x.shape[n] for n in summed) for x, summed in ((first, left), (second, right))
    )
    first = reshape(permute_dims(first, (*rows, *left)), (*row_shape, first_sum))
    # Over all axes it is a product of vectors. OpenVINO 2026.4 ends the process for one of a row and a column.
    second = permute_dims(second, (*right, *columns))
    second = reshape(second, (second_sum, math.prod(column_shape)) if columns else (second_sum,))
    return reshape(matmul(first, second), (*row_shape, *column_shape))
