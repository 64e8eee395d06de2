"""Sums, means, extremes and variances over axes of values, as the array API has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from sdpa_xp_export._array_api import arithmetic, pieces
from sdpa_xp_export._array_api import elementwise as functions
from sdpa_xp_export._array_api.arithmetic import admitted, computed, elementwise, kernel_dtype
from sdpa_xp_export._array_api.axes import Axes, axes_of
from sdpa_xp_export._dtypes.promotion import FLOATING, UNSIGNED

if TYPE_CHECKING:
    from sdpa_xp_export._graph.value import Value

HALVES = ("float16", "bfloat16")
LEAST, HALF = -(2**63), 2**31


def total(value: Value, *, axis: Axes = None, keepdims: bool = False, dtype: str | None = None) -> Value:
    """Sum; integers are summed in 64 bits unless `dtype` says otherwise, and conditions are counted."""
    value = value if dtype is None else value.astype(dtype)
    number = value.astype("int64") if value.dtype == "bool" else admitted("sum", "numeric", value)
    if number.dtype in FLOATING:
        return _of_floats("ReduceSum", number, axis, keepdims)
    found = _over(axes_of(number, axis), keepdims, number.astype("int64"), _sum_of_integers)
    return found.astype(dtype or ("uint64" if number.dtype in UNSIGNED else "int64"))


def mean(value: Value, *, axis: Axes = None, keepdims: bool = False) -> Value:
    """Return the mean of floats."""
    return _of_floats("ReduceMean", admitted("mean", "floating", value), axis, keepdims)


def largest(value: Value, *, axis: Axes = None, keepdims: bool = False) -> Value:
    """Return the largest number; NaN if one is NaN."""
    return _extreme("ReduceMax", admitted("max", "numeric", value), axis, keepdims)


def smallest(value: Value, *, axis: Axes = None, keepdims: bool = False) -> Value:
    """Return the smallest number; NaN if one is NaN."""
    return _extreme("ReduceMin", admitted("min", "numeric", value), axis, keepdims)


def var(value: Value, *, axis: Axes = None, correction: float = 0.0, keepdims: bool = False) -> Value:
    """Divide the sum of squared distances from the mean by their count minus `correction`, or by 0."""
    number = admitted("var", "floating", value)
    wide = _widened(number)
    distance = wide - mean(wide, axis=axis, keepdims=True)
    squares = distance * distance
    if not correction:
        return mean(squares, axis=axis, keepdims=keepdims).astype(number.dtype)
    count = functions.maximum(_count(wide, axes_of(wide, axis)) - correction, 0.0)
    return (total(squares, axis=axis, keepdims=keepdims) / count).astype(number.dtype)


def std(value: Value, *, axis: Axes = None, correction: float = 0.0, keepdims: bool = False) -> Value:
    """Return the square root of `var`."""
    number = admitted("std", "floating", value)
    found = var(_widened(number), axis=axis, correction=correction, keepdims=keepdims)
    return functions.sqrt(found).astype(number.dtype)


def _widened(value: Value) -> Value:
    """Convert half precision to float32, in which it is summed."""
    return value.astype("float32") if value.dtype in HALVES else value


def _over(axes: tuple[int, ...], keepdims: bool, value: Value, reduce: Callable[[Value, int], Value]) -> Value:
    """Reduce one axis after the other; each is kept with length 1, or removed."""
    for axis in axes:
        value = reduce(value, axis)
    return value if keepdims or not axes else pieces.squeeze(value, axes)


def _of_floats(op: str, value: Value, axis: Axes, keepdims: bool) -> Value:
    found = _over(axes_of(value, axis), keepdims, _widened(value), lambda x, each: pieces.reduce(op, x, each))
    return found.astype(value.dtype)


def _sum_of_integers(value: Value, axis: int) -> Value:
    """Sum by a MatMul with a column of ones: onnxruntime rounds a ReduceSum of integers from 1.28 on."""
    last = value if axis == value.ndim - 1 else pieces.swap(value, axis, -1)
    column = pieces.ones_column(last)
    found = computed("MatMul", last, column, shape=(*last.shape[:-1], 1))
    return found if axis == value.ndim - 1 else pieces.swap(found, axis, -1)


def _extreme(op: str, value: Value, axis: Axes, keepdims: bool) -> Value:
    axes = axes_of(value, axis)
    if value.dtype in ("uint32", "int64", "uint64"):
        return _of_halves(op, value, axes, keepdims)
    wide = value.astype(kernel_dtype(op, value))
    found = _over(axes, keepdims, wide, lambda x, each: pieces.reduce(op, x, each))
    if value.dtype not in FLOATING:
        return found.astype(value.dtype)
    # onnxruntime leaves a NaN out unless it comes first.
    unlike = (~elementwise("Equal", wide, wide, dtype="bool")).astype("uint8")
    nan = _over(axes, keepdims, unlike, lambda x, each: pieces.reduce("ReduceMax", x, each)).astype("bool")
    return functions.where(nan, math.nan, found).astype(value.dtype)


def _of_halves(op: str, value: Value, axes: tuple[int, ...], keepdims: bool) -> Value:
    """Find the extreme upper 32 bits, then the extreme lower 32 bits among the numbers that have them.

    onnxruntime takes the lower halves of int64 for signed numbers where the upper ones are equal; so both
    halves are compared as int32, in which the lower ones are shifted to begin at the smallest.
    """
    whole = value.astype("int64")
    if value.dtype == "uint64":  # in the order of signed numbers
        whole = whole + LEAST
    upper = (whole >> 32).astype("int32")
    lower = (whole - HALF).astype("int32")
    most = _over(axes, True, upper, lambda x, each: pieces.reduce(op, x, each))
    least = -HALF if op == "ReduceMax" else HALF - 1
    lower = functions.where(arithmetic.equal(upper, most), lower, least)
    rest = _over(axes, True, lower, lambda x, each: pieces.reduce(op, x, each))
    found = (most.astype("int64") << 32) + rest.astype("int64") + HALF
    found = (found + LEAST if value.dtype == "uint64" else found).astype(value.dtype)
    return found if keepdims or not axes else pieces.squeeze(found, axes)


def _count(value: Value, axes: tuple[int, ...]) -> Value:
    """Return the number of elements along some axes, in the dtype of `value`."""
    graph = value.graph
    count = graph.constant(1, "int64")
    for axis in axes:
        length = value.shape[axis]
        if isinstance(length, int):
            count = count * length
        else:
            found = graph.add("Shape", value, dtype="int64", shape=(1,), start=axis, end=axis + 1)
            count = count * pieces.scalar(found)
    return count.astype(value.dtype)
