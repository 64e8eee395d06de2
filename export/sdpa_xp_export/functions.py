"""The functions of the array API that a caller's function of the indices may use, on the values of a graph."""

from __future__ import annotations

import math

from sdpa_xp_export.array import Value, together, unary
from sdpa_xp_export.shapes import joint_shape

bool = "bool"  # dtypes of a graph are their names
int32, int64, float16, float32, float64 = "int32", "int64", "float16", "float32", "float64"


def where(condition: Value, one: Value | float, other: Value | float) -> Value:
    """condition, one, other -> Where(condition, one, other)."""
    if isinstance(one, Value):
        one, two = together(one, other)
    elif isinstance(other, Value):
        two, one = together(other, one)
    else:
        graph = condition.graph
        one, two = (graph.constant(number, graph.real) for number in (one, other))
    shape = joint_shape(condition.shape, one.shape, two.shape)
    return condition.graph.add("Where", condition, one, two, dtype=one.dtype, shape=shape)


def maximum(one: Value, other: Value | float) -> Value:
    """The larger of two."""
    return one.with_other("Max", other)


def minimum(one: Value, other: Value | float) -> Value:
    """The smaller of two."""
    return one.with_other("Min", other)


def clip(value: Value, least: float, most: float) -> Value:
    """`value`, within bounds."""
    return minimum(maximum(value, least), most)


def astype(value: Value, dtype: str) -> Value:
    """`value` in another dtype."""
    return value.astype(dtype)


def abs(value: Value) -> Value:
    """Without the sign."""
    return unary("Abs", value)


def exp(value: Value) -> Value:
    """e to the power of it."""
    return unary("Exp", _real(value))


def log(value: Value) -> Value:
    """The natural logarithm."""
    return unary("Log", _real(value))


def sqrt(value: Value) -> Value:
    """The square root."""
    return unary("Sqrt", _real(value))


def tanh(value: Value) -> Value:
    """The hyperbolic tangent."""
    return unary("Tanh", _real(value))


def cos(value: Value) -> Value:
    """The cosine; in float64 1 - 2 sin(x / 2)^2, since onnxruntime 1.23 has no Cos of it on the CPU."""
    real = _real(value)
    if real.dtype != "float64":
        return unary("Cos", real)
    half = unary("Sin", real * 0.5)
    return 1.0 - half * half * 2.0


def floor(value: Value) -> Value:
    """Rounded down."""
    return unary("Floor", _real(value))


def logical_and(one: Value, other: Value) -> Value:
    """Both."""
    return one & other


def logical_or(one: Value, other: Value) -> Value:
    """One of them."""
    return one | other


def logical_not(value: Value) -> Value:
    """Not."""
    return ~value


def is_masked(value: Value) -> Value:
    """Where a score or a bias is -inf; a NaN is not."""
    return value == -math.inf


def _real(value: Value) -> Value:
    return value if value.floating else value.astype(value.graph.real)
