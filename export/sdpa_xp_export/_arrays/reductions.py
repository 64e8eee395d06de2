"""Reductions over axes, sums and products up to each element, and products of matrices, vectors and axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat

from sdpa_xp.errors import ArgumentValueError

from .._dtypes.dtype import FLOATING, UNSIGNED, dtype_name
from .._graph import GraphValue, has_names
from . import ops
from .creation import dtype_like
from .dispatch import admitted, array_function, computed, elementwise, kernel_dtype, operands, widened
from .elementwise import equal, greater, maximum, not_equal, sqrt, subtract, where
from .indexing import item
from .manipulation import (
    Axes,
    axes_of,
    axis_of,
    broadcast_to,
    concat,
    expand_dims,
    moveaxis,
    permute_dims,
    reshape,
    squeeze,
)

__all__ = ["all", "any", "count_nonzero", "cumulative_prod", "cumulative_sum", "diff", "max", "mean"]
__all__ += ["matmul", "min", "prod", "std", "sum", "tensordot", "var", "vecdot"]

LEAST, HALF = -(2**63), 2**31


def sum(x: Any, /, *, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """Sum; integers are summed in 64 bits unless `dtype` says otherwise, and conditions are counted."""
    counted = isinstance(x, GraphValue) and x.elem_type == "bool"
    return accumulated("sum", _sum, x.astype("int64") if counted else x, dtype, axis=axis, keepdims=keepdims)


def accumulated(name: str, compute: Callable[..., GraphValue], x: Any, dtype: Any, **keywords: Any) -> Any:
    """Return a sum or a product: floats in their dtype, integers in 64 bits, or in `dtype`.

    `compute` gets int64, in which integers wrap as in any dtype, or floats of at least 32 bits.
    """
    if not isinstance(x, GraphValue):
        dtype = None if dtype is None else dtype_like(x, dtype)
        return getattr(array_api_compat.array_namespace(x), name)(x, dtype=dtype, **keywords)
    value = x if dtype is None else x.astype(dtype_name(dtype))
    number = admitted(name, "numeric", value)
    if number.elem_type in FLOATING:
        return compute(widened(number), **keywords).astype(number.elem_type)
    wide = "uint64" if number.elem_type in UNSIGNED else "int64"
    return compute(number.astype("int64"), **keywords).astype(wide if dtype is None else dtype_name(dtype))


def _sum(value: GraphValue, axis: Axes, keepdims: bool) -> GraphValue:
    if value.elem_type in FLOATING:
        return _of_floats("ReduceSum", value, axis, keepdims)
    return _over(axes_of(value, axis), keepdims, value, _sum_of_integers)


@array_function
def count_nonzero(value: GraphValue, *, axis: Axes = None, keepdims: bool = False) -> GraphValue:
    """Count the elements that are not 0."""
    return _sum(_is_nonzero(value).astype("int64"), axis, keepdims)


@array_function
def any(value: GraphValue, *, axis: Axes = None, keepdims: bool = False) -> GraphValue:
    """Return whether one element is not 0; False if there is none."""
    # A sum, because onnxruntime's ReduceMax fails if there is no element.
    return greater(count_nonzero(value, axis=axis, keepdims=keepdims), 0)


@array_function
def all(value: GraphValue, *, axis: Axes = None, keepdims: bool = False) -> GraphValue:
    """Return whether no element is 0; True if there is none."""
    return equal(count_nonzero(~_is_nonzero(value), axis=axis, keepdims=keepdims), 0)


def _is_nonzero(value: GraphValue) -> GraphValue:
    return value if value.elem_type == "bool" else not_equal(value, 0)


@array_function
def mean(value: GraphValue, *, axis: Axes = None, keepdims: bool = False) -> GraphValue:
    """Return the mean of floats; NaN if there is none."""
    number = admitted("mean", "floating", value)
    axes = axes_of(number, axis)
    lengths = [number.dims[position] for position in axes]
    if not has_names(lengths) and 0 not in lengths:
        return _of_floats("ReduceMean", number, axis, keepdims)
    wide = widened(number)  # onnxruntime's ReduceMean of nothing is 0
    return (_sum(wide, axis, keepdims) / _count(wide, axes)).astype(number.elem_type)


def _extreme_of(name: str, op: str) -> Callable[..., GraphValue]:
    """Make a function that returns the largest, or the smallest, number; NaN if one is NaN.

    Axes that are known to be empty are refused. If a run has none, it is the other end of the dtype.
    """

    def function(value: GraphValue, *, axis: Axes = None, keepdims: bool = False) -> GraphValue:
        axes = axes_of(value, axis)
        if 0 in (value.dims[position] for position in axes):
            rule = f"`{name}` must be over at least one number"
            raise ArgumentValueError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
        return _extreme(op, admitted(name, "numeric", value), axes, keepdims)

    return array_function(function, name)


max, min = _extreme_of("max", "ReduceMax"), _extreme_of("min", "ReduceMin")


@array_function
def var(value: GraphValue, *, axis: Axes = None, correction: float = 0.0, keepdims: bool = False) -> GraphValue:
    """Divide the sum of squared distances from the mean by their count minus `correction`, or by 0."""
    number = admitted("var", "floating", value)
    wide = widened(number)
    distance = wide - mean(wide, axis=axis, keepdims=True)
    squares = distance * distance
    if not correction:
        return mean(squares, axis=axis, keepdims=keepdims).astype(number.elem_type)
    count = maximum(_count(wide, axes_of(wide, axis)) - correction, 0.0)
    return (_sum(squares, axis, keepdims) / count).astype(number.elem_type)


@array_function
def std(value: GraphValue, *, axis: Axes = None, correction: float = 0.0, keepdims: bool = False) -> GraphValue:
    """Return the square root of `var`."""
    number = admitted("std", "floating", value)
    variance = var(widened(number), axis=axis, correction=correction, keepdims=keepdims)
    return sqrt(variance).astype(number.elem_type)


def _over(
    axes: tuple[int, ...], keepdims: bool, value: GraphValue, reduce: Callable[[GraphValue, int], GraphValue]
) -> GraphValue:
    """Reduce one axis after the other; each is kept with length 1, or removed."""
    for axis in axes:
        value = reduce(value, axis)
    return value if keepdims or not axes else squeeze(value, axes)


def _of_floats(op: str, value: GraphValue, axis: Axes, keepdims: bool) -> GraphValue:
    reduced = _over(axes_of(value, axis), keepdims, widened(value), lambda x, axis: ops.reduce(op, x, axis))
    return reduced.astype(value.elem_type)


def _sum_of_integers(value: GraphValue, axis: int) -> GraphValue:
    """Sum by a MatMul with a column of ones: onnxruntime rounds a ReduceSum of integers from 1.28 on."""
    last = value if axis == value.ndim - 1 else ops.swap(value, axis, -1)
    column = ops.ones_column(last)
    total = computed("MatMul", last, column, shape=(*last.dims[:-1], 1))
    return total if axis == value.ndim - 1 else ops.swap(total, axis, -1)


def _extreme(op: str, value: GraphValue, axes: tuple[int, ...], keepdims: bool) -> GraphValue:
    is_wide = value.elem_type in ("uint32", "int64", "uint64")
    if is_wide and not value.graph.runtime.is_openvino:
        return _extreme_by_halves(op, value, axes, keepdims)
    wide = value.astype("int32" if is_wide else kernel_dtype(op, value))
    extreme = _over(axes, keepdims, wide, lambda x, axis: ops.reduce(op, x, axis))
    if value.elem_type not in FLOATING:
        return extreme.astype(value.elem_type)
    # onnxruntime leaves a NaN out unless it comes first.
    is_nan = (~elementwise("Equal", wide, wide, dtype="bool")).astype("uint8")
    has_nan = _over(axes, keepdims, is_nan, lambda x, axis: ops.reduce("ReduceMax", x, axis)).astype("bool")
    return where(has_nan, math.nan, extreme).astype(value.elem_type)


def _extreme_by_halves(op: str, value: GraphValue, axes: tuple[int, ...], keepdims: bool) -> GraphValue:
    """Find the extreme upper 32 bits, then the extreme lower 32 bits among the numbers that have them.

    onnxruntime takes the lower halves of int64 for signed numbers where the upper ones are equal. So both
    halves are compared as int32, in which the lower ones are shifted to begin at the smallest.
    """
    whole = value.astype("int64")
    if value.elem_type == "uint64":  # in the order of signed numbers
        whole = whole + LEAST
    upper = (whole >> 32).astype("int32")
    lower = (whole - HALF).astype("int32")
    extreme = _over(axes, True, upper, lambda x, axis: ops.reduce(op, x, axis))
    never_chosen = -HALF if op == "ReduceMax" else HALF - 1
    lower = where(equal(upper, extreme), lower, never_chosen)
    rest = _over(axes, True, lower, lambda x, axis: ops.reduce(op, x, axis))
    result = (extreme.astype("int64") << 32) + rest.astype("int64") + HALF
    result = (result + LEAST if value.elem_type == "uint64" else result).astype(value.elem_type)
    return result if keepdims or not axes else squeeze(result, axes)


def _count(value: GraphValue, axes: tuple[int, ...]) -> GraphValue:
    """Return the number of elements along some axes, in the dtype of `value`."""
    count = value.graph.constant(1, "int64")
    for axis in axes:
        length = value.dims[axis]
        count = count * (length if isinstance(length, int) else ops.scalar(ops.length_of(value, axis)))
    return count.astype(value.elem_type)


def prod(x: Any, /, *, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Any:
    """Multiply; integers are multiplied in 64 bits unless `dtype` says otherwise, and wrap."""
    return accumulated("prod", _prod, x, dtype, axis=axis, keepdims=keepdims)


def _prod(number: GraphValue, axis: Axes, keepdims: bool) -> GraphValue:
    axes = axes_of(number, axis)
    for position in sorted(axes, reverse=True):
        number = _products(_with_initial(number, 1, position), position)[0]
    for position in sorted(axes) if keepdims else ():
        number = expand_dims(number, axis=position)
    return number


def _sums(number: GraphValue, axis: int | None, include_initial: bool) -> GraphValue:
    position = _only_axis("cumulative_sum", number, axis)
    along = number.graph.constant(position, "int64")
    sums = number.graph.add("CumSum", number, along, dtype=number.elem_type, shape=number.dims)
    return _with_initial(sums, 0, position) if include_initial else sums


def _products_up_to(number: GraphValue, axis: int | None, include_initial: bool) -> GraphValue:
    position = _only_axis("cumulative_prod", number, axis)
    if include_initial:
        return _products(_with_initial(number, 1, position), position)[1]
    if number.dims[position] != 0 and not has_names(number.dims[position : position + 1]):
        return _products(number, position)[1]
    products = _products(_with_initial(number, 1, position), position)[1]
    bounds = (number.graph.constant([bound], "int64") for bound in (1, 2**62))
    return ops.cut(products, (next(bounds), next(bounds)), position, number.dims[position])


def _cumulative(name: str, compute: Callable[..., GraphValue]) -> Callable[..., Any]:
    """Make a function of what is up to each element; with `include_initial`, also of nothing in front."""

    def function(
        x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False
    ) -> Any:
        return accumulated(name, compute, x, dtype, axis=axis, include_initial=include_initial)

    return function


cumulative_sum = _cumulative("cumulative_sum", _sums)
cumulative_prod = _cumulative("cumulative_prod", _products_up_to)


def _only_axis(name: str, value: GraphValue, axis: int | None) -> int:
    if not value.ndim or (axis is None and value.ndim != 1):
        rule = f"`{name}` must be along an axis, which may be left out if there is just one"
        raise ArgumentValueError(value.graph.function, rule, {"axis": axis, "shape": value.dims})
    return axis_of(value, axis or 0)


def _with_initial(value: GraphValue, initial: int, axis: int) -> GraphValue:
    shape = (*value.shape[:axis], 1, *value.shape[axis + 1 :])
    first = broadcast_to(ops.to_rank(value.graph.constant(initial, value.elem_type), value.ndim), shape)
    return concat([first, value], axis=axis)


def _products(value: GraphValue, axis: int) -> tuple[GraphValue, GraphValue]:
    """Return the product along an axis, and the product up to each element, by a Scan.

    onnxruntime's ReduceProd of int64 goes through floats from 1.28 on. Its Scan fails if there is no element.
    """
    graph, moved = value.graph, moveaxis(value, axis, 0)
    rest = moved.dims[1:]
    one = broadcast_to(ops.to_rank(graph.constant(1, value.elem_type), len(rest)), moved.shape[1:])
    body = graph.loop_body()
    product, element = (body.input(name, value.elem_type, rest) for name in ("Product", "Element"))
    product = product * element
    total, products = graph.add_many(
        "Scan",
        one,
        moved,
        outputs=[(value.elem_type, rest), (value.elem_type, moved.dims)],
        body=body.subgraph([product, body.copy(product)]),
        num_scan_inputs=1,
    )
    return total, moveaxis(products, 0, axis)


@array_function
def diff(
    value: GraphValue, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None
) -> GraphValue:
    """Return the differences of neighbours along an axis, taken `n` times."""
    number = admitted("diff", "numeric", value)
    position = axis_of(number, axis)
    joined = [number.graph.operand(part) for part in (prepend, number, append) if part is not None]
    number = concat(joined, axis=position) if len(joined) > 1 else number
    before = (slice(None),) * position
    for _ in range(n):
        number = subtract(item(number, (*before, slice(1, None))), item(number, (*before, slice(None, -1))))
    return number


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
    if is_known or (one.ndim < 3 and other.ndim < 3) or one.graph.is_part:
        return product
    # Where there is nothing to sum, onnxruntime 1.31 sets one matrix of a batch to 0, and no other one.
    is_empty = equal(ops.length_of(one, one.ndim - 1), 0)
    return where(is_empty, one.graph.constant(0, product.elem_type), product)


@array_function
def vecdot(one: GraphValue, other: GraphValue, *, axis: int = -1) -> GraphValue:
    """Sum the products along an axis, which both arrays have."""
    first, second = operands("vecdot", "numeric", one, other)
    if axis >= 0 or axis < -first.ndim or axis < -second.ndim:
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
