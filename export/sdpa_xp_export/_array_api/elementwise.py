"""The elementwise functions of the array API on the values of a graph."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sdpa_xp.checks import message
from sdpa_xp_export._array_api.arithmetic import (
    admitted,
    computed,
    elementwise,
    equal,
    invert,
    kernel_dtype,
    logical,
    operands,
    together,
    unary,
)
from sdpa_xp_export._dtypes.promotion import DEFAULTS, INTEGERS
from sdpa_xp_export._graph.lengths import Length
from sdpa_xp_export._graph.shapes import joint_shape

if TYPE_CHECKING:
    from sdpa_xp_export._graph.graph import Graph
    from sdpa_xp_export._graph.value import Value


def where(condition: Value, one: Any, other: Any) -> Value:
    """Choose elements of one of two operands; two Python scalars get the default dtypes."""
    if getattr(condition, "dtype", None) != "bool":
        rule, got = "the condition of `where` must be a boolean array", {"condition": condition}
        raise TypeError(message("where", rule, got))
    graph = condition.graph
    if _is_scalar(one) and _is_scalar(other):
        one, other = _of_default_dtype(graph, one, other)
    first, second = together("where", one, other)
    inner = kernel_dtype("Where", first)
    shape = joint_shape(condition.shape, first.shape, second.shape)
    made = graph.add("Where", condition, first.astype(inner), second.astype(inner), dtype=inner, shape=shape)
    return made.astype(first.dtype)


def _is_scalar(given: Any) -> bool:
    return isinstance(given, bool | int | float | Length)


def _of_default_dtype(graph: Graph, *scalars: bool | int | float | Length) -> list[Value]:
    """Make constants in the default dtype of the widest kind among scalars; a length is an integer."""
    dtype = DEFAULTS[int]
    if any(isinstance(each, float) for each in scalars):
        dtype = graph.real
    elif all(isinstance(each, bool) for each in scalars):
        dtype = DEFAULTS[bool]
    return [
        graph.operand(each).astype(dtype) if isinstance(each, Length) else graph.constant(each, dtype)
        for each in scalars
    ]


def maximum(one: Any, other: Any) -> Value:
    """Return the larger of two numbers; NaN if one of them is NaN."""
    return _extreme("Max", "maximum", "Greater", one, other)


def minimum(one: Any, other: Any) -> Value:
    """Return the smaller of two numbers; NaN if one of them is NaN."""
    return _extreme("Min", "minimum", "Less", one, other)


def _extreme(op: str, name: str, compare: str, one: Any, other: Any) -> Value:
    """Write Max or Min; int64 is compared and chosen, since onnxruntime's kernel misorders it."""
    first, second = operands(name, "numeric", one, other)
    if first.dtype != "int64":
        return elementwise(op, first, second)
    return where(elementwise(compare, first, second, dtype="bool"), first, second)


def clip(value: Value, min: Any = None, max: Any = None) -> Value:
    """Limit `value` to bounds, each of which may be None; the result has the dtype of `value`."""
    if not hasattr(value, "graph"):
        raise TypeError(message("clip", "`x` must be an array", {"x": repr(value)}))
    found = value if min is None else maximum(value, min)
    found = found if max is None else minimum(found, max)
    return admitted("clip", "numeric", found).astype(value.dtype)


def absolute(value: Value) -> Value:
    """Return the absolute value."""
    return unary("Abs", "abs", "numeric", value)


def positive(value: Value) -> Value:
    """Return the number itself."""
    return admitted("positive", "numeric", value)


def square(value: Value) -> Value:
    """Return the number times itself."""
    number = admitted("square", "numeric", value)
    return number * number


def exp(value: Value) -> Value:
    """Return e to the power of the number."""
    return unary("Exp", "exp", "floating", value)


def log(value: Value) -> Value:
    """Return the natural logarithm."""
    return unary("Log", "log", "floating", value)


def sqrt(value: Value) -> Value:
    """Return the square root."""
    return unary("Sqrt", "sqrt", "floating", value)


def tanh(value: Value) -> Value:
    """Return the hyperbolic tangent."""
    return unary("Tanh", "tanh", "floating", value)


def sin(value: Value) -> Value:
    """Return the sine."""
    return unary("Sin", "sin", "floating", value)


def cos(value: Value) -> Value:
    """Return the cosine; in float64 1 - 2 sin(x / 2)^2, for which onnxruntime 1.23 has no Cos."""
    real = admitted("cos", "floating", value)
    if real.dtype != "float64":
        return unary("Cos", "cos", "floating", real)
    half = unary("Sin", "sin", "floating", real * 0.5)
    return 1.0 - half * half * 2.0


def erf(value: Value) -> Value:
    """Return the error function, which the standard lacks; onnxruntime before 1.28 gives 1 for NaN."""
    number = admitted("erf", "floating", value)
    found = unary("Erf", "erf", "floating", number)
    return found if number.graph.erf_keeps_nan else where(equal(number, number), found, number)


def floor(value: Value) -> Value:
    """Round down; integers stay as they are."""
    number = admitted("floor", "numeric", value)
    return number if number.dtype in INTEGERS else computed("Floor", number, shape=number.shape)


def logical_and(one: Any, other: Any) -> Value:
    """Return whether both conditions hold."""
    return logical("And", "logical_and", one, other)


def logical_or(one: Any, other: Any) -> Value:
    """Return whether at least one condition holds."""
    return logical("Or", "logical_or", one, other)


def logical_xor(one: Any, other: Any) -> Value:
    """Return whether exactly one condition holds."""
    return logical("Xor", "logical_xor", one, other)


def logical_not(value: Value) -> Value:
    """Return whether a condition does not hold."""
    return invert(admitted("logical_not", "boolean", value))


def is_masked(value: Value) -> Value:
    """Return whether a score or a bias is -inf."""
    return equal(admitted("is_masked", "floating", value), -math.inf)
