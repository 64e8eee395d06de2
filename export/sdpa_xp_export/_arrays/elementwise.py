"""The elementwise functions of the array API: comparisons, choices, rounding, signs, and what is one operator.

With `exact=False` they write ONNX's own operator for int64, too. It is right for lengths and positions; for
integers of any size it takes several nodes. Division, powers and most functions of floats are in arithmetic.py.

Rounding keeps the sign of a zero. onnxruntime's Where returns 0 for a -0 that it chooses where the condition
holds, but keeps a -0 where the condition does not hold. So a number that may be -0 stands last in `where`, or
its sign is multiplied to the result. Such a condition is no Not, for which onnxruntime swaps the two. ONNX
cannot read the sign of a NaN before opset 26; it counts as positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

from .._dtypes.dtype import FLOATING, INTEGERS, SIGNED, default_dtype
from .._graph import FloatOfLengths, Graph, GraphValue, Length
from .dispatch import (
    Scalar,
    admitted,
    array_function,
    binary,
    computed,
    elementwise,
    kernel_dtype,
    operands,
    promoted,
    unary,
)

__all__ = ["abs", "add", "bitwise_and", "bitwise_invert", "bitwise_or", "bitwise_xor", "clip", "cos", "divide"]
__all__ += ["equal", "erf", "exp", "floor", "greater", "greater_equal", "is_masked", "less", "less_equal"]
__all__ += ["log", "logical_and", "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "multiply"]
__all__ += ["negative", "not_equal", "positive", "sin", "sqrt", "square", "subtract", "tanh", "where"]
__all__ += ["ceil", "conj", "copysign", "isfinite", "isinf", "isnan", "nextafter", "real", "round", "sign"]
__all__ += ["signbit", "trunc"]


def _unary(name: str, op: str, category: str = "floating") -> Callable[[Any], GraphValue]:
    """Make a function of one operand that is one operator of ONNX."""

    return array_function(lambda value: unary(op, name, category, value), name)


def _binary(name: str, op: str, category: str, dtype: str | None = None) -> Callable[[Any, Any], GraphValue]:
    """Make a function of two operands that is one operator of ONNX; `dtype` is another dtype of its result."""

    return array_function(lambda one, other: binary(op, name, category, one, other, dtype), name)


def one_operator(name: str, formula: Callable[[GraphValue], GraphValue]) -> Callable[[Any], GraphValue]:
    """Make a function that is one operator of ONNX, and `formula` in float64."""

    def function(value: Any) -> GraphValue:
        number = admitted(name, "floating", value)
        if number.elem_type == "float64":
            return formula(number)
        return unary(name.capitalize(), name, "floating", number)

    return array_function(function, name)


def _unchanged(name: str) -> Callable[[Any], GraphValue]:
    """Make a function that returns real numbers as they are: a graph has no complex dtypes."""
    return array_function(lambda value: admitted(name, "numeric", value), name)


positive, real, conj = map(_unchanged, ("positive", "real", "conj"))
add = _binary("add", "Add", "numeric")
subtract = _binary("subtract", "Sub", "numeric")
multiply = _binary("multiply", "Mul", "numeric")
divide = _binary("divide", "Div", "floating")
negative = _unary("negative", "Neg", "numeric")  # unsigned integers wrap, as in NumPy
abs = _unary("abs", "Abs", "numeric")
exp = _unary("exp", "Exp")
log = _unary("log", "Log")
sqrt = _unary("sqrt", "Sqrt")
tanh = _unary("tanh", "Tanh")
sin = _unary("sin", "Sin")
equal = _binary("equal", "Equal", "any", "bool")
less = _binary("less", "Less", "numeric", "bool")
less_equal = _binary("less_equal", "LessOrEqual", "numeric", "bool")
greater = _binary("greater", "Greater", "numeric", "bool")
greater_equal = _binary("greater_equal", "GreaterOrEqual", "numeric", "bool")
logical_and = _binary("logical_and", "And", "boolean")
logical_or = _binary("logical_or", "Or", "boolean")
logical_xor = _binary("logical_xor", "Xor", "boolean")


@array_function
def square(value: GraphValue) -> GraphValue:
    """Return the number times itself."""
    number = admitted("square", "numeric", value)
    return number * number


# onnxruntime 1.23 has no Cos of float64, but a Sin: cos(x) = 1 - 2 sin(x / 2)^2.
cos = one_operator("cos", lambda x: 1.0 - square(sin(x * 0.5)) * 2.0)


@array_function
def erf(value: GraphValue) -> GraphValue:
    """Return the error function, which the standard lacks."""
    number = admitted("erf", "floating", value)
    if number.elem_type == "float64":
        # onnxruntime 1.31 has no kernel; OpenVINO 2026.4 and the evaluator of onnx 1.23.2 compute in float32.
        rule = "`erf` must not be of a float64, since no program that was tried computes it in float64"
        got = {"dtype": number.elem_type}
        raise ArgumentTypeError(number.graph.function, rule, got, "Convert the array with `astype`.")
    result = unary("Erf", "erf", "floating", number)
    keeps_nan = not (number.graph.runtime.may_meet("erf of NaN") or number.graph.is_part)
    return result if keeps_nan else where(equal(number, number), result, number)


def _extreme(name: str, op: str, compare: str) -> Callable[..., GraphValue]:
    """Make a function that returns the larger, or the smaller, of two numbers; NaN if one of them is NaN."""

    def function(one: Any, other: Any, *, exact: bool = True) -> GraphValue:
        first, second = operands(name, "numeric", one, other)
        if first.elem_type != "int64" or not exact:
            # A bound that is a constant comes first: onnxscript 0.7.2 makes a Clip of two bounds, under a name
            # that another Clip of the same number also gets.
            return elementwise(op, second, first)
        # onnxruntime's kernel misorders large int64, so the two are compared, and one is chosen.
        return where(elementwise(compare, first, second, dtype="bool"), first, second)

    return array_function(function, name)


maximum, minimum = _extreme("maximum", "Max", "Greater"), _extreme("minimum", "Min", "Less")


@array_function
def clip(value: GraphValue, min: Any = None, max: Any = None, *, exact: bool = True) -> GraphValue:
    """Limit `value` to bounds, each of which may be None; the result has the dtype of `value`."""
    if not hasattr(value, "graph"):
        raise ArgumentTypeError("clip", "`x` must be an array", {"x": repr(value)})
    result = value if min is None else maximum(value, min, exact=exact)
    result = result if max is None else minimum(result, max, exact=exact)
    # A bound of a wider kind promoted it, as in functions of the indices; the standard keeps the dtype of x.
    return admitted("clip", "numeric", result).astype(value.elem_type)


@array_function
def where(condition: GraphValue, one: Any, other: Any) -> GraphValue:
    """Choose elements of one of two operands; two Python scalars get the default dtypes."""
    if getattr(condition, "dtype", None) != "bool":
        rule, got = "the condition of `where` must be a boolean array", {"condition": condition}
        raise ArgumentTypeError("where", rule, got)
    graph = condition.graph
    if isinstance(one, Scalar) and isinstance(other, Scalar):
        one, other = _of_default_dtype(graph, one, other)
    first, second = promoted("where", one, other)
    if first.elem_type == "bool":  # neither onnxruntime nor OpenVINO chooses conditions
        return (condition & first) | (~condition & second)
    inner = kernel_dtype("Where", first)
    shape = graph.joint_shape(condition.dims, first.dims, second.dims)
    chosen = graph.add("Where", condition, first.astype(inner), second.astype(inner), dtype=inner, shape=shape)
    return chosen.astype(first.elem_type)


def _of_default_dtype(graph: Graph, *scalars: Scalar) -> list[GraphValue]:
    """Return constants in the default dtype of the widest kind among scalars; a length is an integer."""
    dtype = default_dtype(int)
    if any(isinstance(scalar, float | FloatOfLengths) for scalar in scalars):
        dtype = graph.settings.float_dtype if graph.is_part else default_dtype(float)
    elif all(isinstance(scalar, bool) for scalar in scalars):
        dtype = default_dtype(bool)
    return [
        graph.operand(scalar).astype(dtype)
        if isinstance(scalar, Length | FloatOfLengths)
        else graph.constant(scalar, dtype)
        for scalar in scalars
    ]


@array_function
def not_equal(one: Any, other: Any) -> GraphValue:
    """Return whether two operands of any dtype differ."""
    return bitwise_invert(equal(one, other))


def is_masked(value: GraphValue) -> GraphValue:
    """Return whether a score or a bias is -inf."""
    return equal(admitted("is_masked", "floating", value), -math.inf)


@array_function
def logical_not(value: GraphValue) -> GraphValue:
    """Return whether a condition does not hold."""
    return bitwise_invert(admitted("logical_not", "boolean", value))


def _bitwise(name: str, op: str) -> Callable[[Any, Any], GraphValue]:
    """Make a function that combines two conditions, or the bits of two integers."""

    def function(one: Any, other: Any) -> GraphValue:
        first, second = operands(name, "integer or boolean", one, other)
        if first.elem_type == "bool":
            return elementwise(op, first, second)
        _bits_need_opset(first, name)
        return elementwise(f"Bitwise{op}", first, second)

    return array_function(function, name)


bitwise_and = _bitwise("bitwise_and", "And")
bitwise_or = _bitwise("bitwise_or", "Or")
bitwise_xor = _bitwise("bitwise_xor", "Xor")


@array_function
def bitwise_invert(value: GraphValue) -> GraphValue:
    """Invert a condition, or the bits of an integer."""
    value = admitted("bitwise_invert", "integer or boolean", value)
    if value.elem_type == "bool":
        return computed("Not", value, shape=value.dims)
    _bits_need_opset(value, "bitwise_invert")
    return computed("BitwiseNot", value, shape=value.dims)


def _bits_need_opset(value: GraphValue, name: str) -> None:
    if value.graph.settings.opset < 18:  # the first with BitwiseAnd, BitwiseOr, BitwiseXor and BitwiseNot
        rule = f"`opset` must be at least 18 for `{name}` of integers"
        raise ArgumentValueError(value.graph.function, rule, {"opset": value.graph.settings.opset})


def _rounding(name: str, round_floats: Callable[[GraphValue], GraphValue]) -> Callable[[Any], GraphValue]:
    """Make a function that rounds floats; integers stay unchanged."""

    def function(value: Any) -> GraphValue:
        number = admitted(name, "numeric", value)
        return number if number.elem_type in INTEGERS else round_floats(number)

    return array_function(function, name)


floor = _rounding("floor", lambda number: computed("Floor", number, shape=number.dims))
ceil = _rounding("ceil", lambda number: computed("Ceil", number, shape=number.dims))
round = _rounding("round", lambda number: computed("Round", number, shape=number.dims))
trunc = _rounding("trunc", lambda number: with_sign(floor(abs(number)), number))


@array_function
def sign(value: GraphValue) -> GraphValue:
    """Return -1, 0 or 1; NaN for NaN."""
    number = admitted("sign", "numeric", value)
    if number.elem_type in FLOATING:
        return computed("Sign", number, shape=number.dims)
    # onnxruntime's Sign of large int64 is wrong.
    is_positive = less(0, number).astype(number.elem_type)
    return is_positive - less(number, 0).astype(number.elem_type) if number.elem_type in SIGNED else is_positive


@array_function
def signbit(value: GraphValue) -> GraphValue:
    """Return whether a float is negative or -0; False for NaN."""
    number = admitted("signbit", "floating", value)
    return less(number, 0.0) | less(1.0 / number, 0.0)


@array_function
def copysign(one: Any, other: Any) -> GraphValue:
    """Return the magnitude of one float with the sign of the other."""
    magnitude, signed = operands("copysign", "floating", one, other)
    return with_sign(abs(magnitude), signed)


def with_sign(magnitude: GraphValue, signed: GraphValue) -> GraphValue:
    """Return a magnitude with the sign of another float, also of its zeros."""
    minus = signed.graph.constant(-1.0, signed.elem_type)
    return magnitude * where(signbit(signed), minus, 1.0)


@array_function
def isnan(value: GraphValue) -> GraphValue:
    """Return whether a number is NaN; an integer is none."""
    number = admitted("isnan", "numeric", value)
    return not_equal(number, number)


@array_function
def isinf(value: GraphValue) -> GraphValue:
    """Return whether a number is infinite; an integer is not."""
    number = admitted("isinf", "numeric", value)
    return equal(abs(number), math.inf) if number.elem_type in FLOATING else not_equal(number, number)


@array_function
def isfinite(value: GraphValue) -> GraphValue:
    """Return whether a number is neither NaN nor infinite, as each integer."""
    number = admitted("isfinite", "numeric", value)
    return less(abs(number), math.inf) if number.elem_type in FLOATING else equal(number, number)


@array_function
def nextafter(one: Any, other: Any) -> GraphValue:
    """Return the float next to one operand on the way to the other."""
    start, end = operands("nextafter", "floating", one, other)
    if start.elem_type not in ("float32", "float64"):  # the steps below are rounded in the dtype itself
        rule = "the arguments of `nextafter` must be float32 or float64"
        raise ArgumentTypeError(start.graph.function, rule, {"dtype": start.elem_type})
    upwards = less(start, end)
    # Where the step goes down, it is the step up from the negated number, negated.
    signs = where(upwards, start.graph.constant(1.0, start.elem_type), -1.0)
    stepped = _above(start * signs) * signs
    # For equal numbers the standard has the second, such as -0 for 0.
    return where(upwards | less(end, start) | isnan(start), stepped, end)


def _above(number: GraphValue) -> GraphValue:
    """Return the next larger float.

    Rump, Zimmermann, Boldo and Melquiond 2009, "Computing predecessor and successor in rounding to nearest",
    Algorithm 2, in which c + phi |c| is rounded to the successor unless c is close to the subnormal numbers.
    """
    info = np.finfo(number.elem_type)
    unit, least = float(info.eps) / 2, float(info.smallest_subnormal)
    factor = unit * (1 + 2 * unit)
    magnitude = abs(number)
    scaled = number * (1 / unit)
    small = (scaled + abs(scaled) * factor) * unit
    stepped = where(less(magnitude, least / unit), number + least, small)
    large = less(least / unit**2 / 2, magnitude)
    stepped = where(large, number + magnitude * factor, stepped)
    lowest = number.graph.constant(-float(info.max), number.elem_type)
    return where(equal(number, -math.inf), lowest, stepped)
