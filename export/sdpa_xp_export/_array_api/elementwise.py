"""The elementwise functions of the array API; division and powers have files of their own."""

from __future__ import annotations

import math
from typing import Any

from sdpa_xp._checks import message
from sdpa_xp_export._array_api.dispatch import array_function
from sdpa_xp_export._array_api.operators import (
    admitted,
    binary,
    computed,
    elementwise,
    kernel_dtype,
    operands,
    promoted,
    unary,
)
from sdpa_xp_export._dtypes.promotion import DEFAULTS, INTEGERS
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._graph.lengths import Length
from sdpa_xp_export._graph.shapes import joint_shape


@array_function
def add(one: Any, other: Any) -> GraphValue:
    """Add."""
    return binary("Add", "add", "numeric", one, other)


@array_function
def subtract(one: Any, other: Any) -> GraphValue:
    """Subtract."""
    return binary("Sub", "subtract", "numeric", one, other)


@array_function
def multiply(one: Any, other: Any) -> GraphValue:
    """Multiply."""
    return binary("Mul", "multiply", "numeric", one, other)


@array_function
def negative(value: GraphValue) -> GraphValue:
    """Change the sign; unsigned integers wrap, as in NumPy."""
    return unary("Neg", "negative", "numeric", value)


@array_function
def positive(value: GraphValue) -> GraphValue:
    """Return the number itself."""
    return admitted("positive", "numeric", value)


@array_function
def abs(value: GraphValue) -> GraphValue:
    """Return the absolute value."""
    return unary("Abs", "abs", "numeric", value)


@array_function
def square(value: GraphValue) -> GraphValue:
    """Return the number times itself."""
    number = admitted("square", "numeric", value)
    return number * number


@array_function
def exp(value: GraphValue) -> GraphValue:
    """Return e to the power of the number."""
    return unary("Exp", "exp", "floating", value)


@array_function
def log(value: GraphValue) -> GraphValue:
    """Return the natural logarithm."""
    return unary("Log", "log", "floating", value)


@array_function
def sqrt(value: GraphValue) -> GraphValue:
    """Return the square root."""
    return unary("Sqrt", "sqrt", "floating", value)


@array_function
def tanh(value: GraphValue) -> GraphValue:
    """Return the hyperbolic tangent."""
    return unary("Tanh", "tanh", "floating", value)


@array_function
def sin(value: GraphValue) -> GraphValue:
    """Return the sine."""
    return unary("Sin", "sin", "floating", value)


@array_function
def cos(value: GraphValue) -> GraphValue:
    """Return the cosine."""
    number = admitted("cos", "floating", value)
    if number.dtype != "float64":
        return unary("Cos", "cos", "floating", number)
    # onnxruntime 1.23 has no Cos of float64, but a Sin: cos(x) = 1 - 2 sin(x / 2)^2.
    half = unary("Sin", "sin", "floating", number * 0.5)
    return 1.0 - half * half * 2.0


@array_function
def erf(value: GraphValue) -> GraphValue:
    """Return the error function, which the standard lacks."""
    number = admitted("erf", "floating", value)
    result = unary("Erf", "erf", "floating", number)
    # onnxruntime before 1.28 returns 1 for NaN.
    return result if number.graph.erf_keeps_nan else where(equal(number, number), result, number)


@array_function
def floor(value: GraphValue) -> GraphValue:
    """Round down; integers stay unchanged."""
    number = admitted("floor", "numeric", value)
    return number if number.dtype in INTEGERS else computed("Floor", number, shape=number.shape)


@array_function
def maximum(one: Any, other: Any) -> GraphValue:
    """Return the larger of two numbers; NaN if one of them is NaN."""
    return _extreme("Max", "maximum", "Greater", one, other)


@array_function
def minimum(one: Any, other: Any) -> GraphValue:
    """Return the smaller of two numbers; NaN if one of them is NaN."""
    return _extreme("Min", "minimum", "Less", one, other)


def _extreme(op: str, name: str, compare: str, one: Any, other: Any) -> GraphValue:
    first, second = operands(name, "numeric", one, other)
    if first.dtype != "int64":
        return elementwise(op, first, second)
    # onnxruntime's kernel misorders int64, so the two are compared, and one is chosen.
    return where(elementwise(compare, first, second, dtype="bool"), first, second)


@array_function
def clip(value: GraphValue, min: Any = None, max: Any = None) -> GraphValue:
    """Limit `value` to bounds, each of which may be None; the result has the dtype of `value`."""
    if not hasattr(value, "graph"):
        raise TypeError(message("clip", "`x` must be an array", {"x": repr(value)}))
    result = value if min is None else maximum(value, min)
    result = result if max is None else minimum(result, max)
    return admitted("clip", "numeric", result).astype(value.dtype)


@array_function
def where(condition: GraphValue, one: Any, other: Any) -> GraphValue:
    """Choose elements of one of two operands; two Python scalars get the default dtypes."""
    if getattr(condition, "dtype", None) != "bool":
        rule, got = "the condition of `where` must be a boolean array", {"condition": condition}
        raise TypeError(message("where", rule, got))
    graph = condition.graph
    if _is_scalar(one) and _is_scalar(other):
        one, other = _of_default_dtype(graph, one, other)
    first, second = promoted("where", one, other)
    inner = kernel_dtype("Where", first)
    shape = joint_shape(condition.shape, first.shape, second.shape)
    chosen = graph.add("Where", condition, first.astype(inner), second.astype(inner), dtype=inner, shape=shape)
    return chosen.astype(first.dtype)


def _is_scalar(operand: Any) -> bool:
    return isinstance(operand, bool | int | float | Length)


def _of_default_dtype(graph: Graph, *scalars: bool | int | float | Length) -> list[GraphValue]:
    """Return constants in the default dtype of the widest kind among scalars; a length is an integer."""
    dtype = DEFAULTS[int]
    if any(isinstance(scalar, float) for scalar in scalars):
        dtype = graph.float_dtype
    elif all(isinstance(scalar, bool) for scalar in scalars):
        dtype = DEFAULTS[bool]
    return [
        graph.operand(scalar).astype(dtype) if isinstance(scalar, Length) else graph.constant(scalar, dtype)
        for scalar in scalars
    ]


@array_function
def equal(one: Any, other: Any) -> GraphValue:
    """Return whether two operands of any dtype are equal."""
    return binary("Equal", "equal", "any", one, other, "bool")


@array_function
def not_equal(one: Any, other: Any) -> GraphValue:
    """Return whether two operands of any dtype differ."""
    return bitwise_invert(equal(one, other))


@array_function
def less(one: Any, other: Any) -> GraphValue:
    """Return whether the first number is smaller."""
    return binary("Less", "less", "numeric", one, other, "bool")


@array_function
def less_equal(one: Any, other: Any) -> GraphValue:
    """Return whether the first number is not larger."""
    return binary("LessOrEqual", "less_equal", "numeric", one, other, "bool")


@array_function
def greater(one: Any, other: Any) -> GraphValue:
    """Return whether the first number is larger."""
    return binary("Greater", "greater", "numeric", one, other, "bool")


@array_function
def greater_equal(one: Any, other: Any) -> GraphValue:
    """Return whether the first number is not smaller."""
    return binary("GreaterOrEqual", "greater_equal", "numeric", one, other, "bool")


def is_masked(value: GraphValue) -> GraphValue:
    """Return whether a score or a bias is -inf."""
    return equal(admitted("is_masked", "floating", value), -math.inf)


@array_function
def logical_and(one: Any, other: Any) -> GraphValue:
    """Return whether both conditions hold."""
    return binary("And", "logical_and", "boolean", one, other)


@array_function
def logical_or(one: Any, other: Any) -> GraphValue:
    """Return whether at least one condition holds."""
    return binary("Or", "logical_or", "boolean", one, other)


@array_function
def logical_xor(one: Any, other: Any) -> GraphValue:
    """Return whether exactly one condition holds."""
    return binary("Xor", "logical_xor", "boolean", one, other)


@array_function
def logical_not(value: GraphValue) -> GraphValue:
    """Return whether a condition does not hold."""
    return bitwise_invert(admitted("logical_not", "boolean", value))


@array_function
def bitwise_and(one: Any, other: Any) -> GraphValue:
    """Combine two conditions, or the bits of two integers."""
    return _bitwise("And", "bitwise_and", one, other)


@array_function
def bitwise_or(one: Any, other: Any) -> GraphValue:
    """Combine two conditions, or the bits of two integers."""
    return _bitwise("Or", "bitwise_or", one, other)


@array_function
def bitwise_xor(one: Any, other: Any) -> GraphValue:
    """Combine two conditions, or the bits of two integers."""
    return _bitwise("Xor", "bitwise_xor", one, other)


def _bitwise(op: str, name: str, one: Any, other: Any) -> GraphValue:
    first, second = operands(name, "integer or boolean", one, other)
    if first.dtype == "bool":
        return elementwise(op, first, second)
    _bits_need_opset(first, name)
    return elementwise(f"Bitwise{op}", first, second)


@array_function
def bitwise_invert(value: GraphValue) -> GraphValue:
    """Invert a condition, or the bits of an integer."""
    value = admitted("bitwise_invert", "integer or boolean", value)
    if value.dtype == "bool":
        return computed("Not", value, shape=value.shape)
    _bits_need_opset(value, "bitwise_invert")
    return computed("BitwiseNot", value, shape=value.shape)


def _bits_need_opset(value: GraphValue, name: str) -> None:
    if value.graph.opset < 18:  # the first with BitwiseAnd, BitwiseOr, BitwiseXor and BitwiseNot
        rule = f"`opset` must be at least 18 for `{name}` of integers"
        raise ValueError(message(value.graph.function, rule, {"opset": value.graph.opset}))
