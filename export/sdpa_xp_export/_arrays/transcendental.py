"""Exponentials, logarithms and roots of floats, and trigonometric and hyperbolic functions.

ONNX has no operator for the first ones. Half precision is computed in float32, and rounded once. For the others
onnxruntime's CPU provider has kernels for float32, and in float64 they are formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._graph import GraphValue
from .arithmetic import pow
from .elementwise import abs, cos, equal, exp, less, log, maximum, minimum, sin, sqrt, where
from .operators import admitted, array_function, operands, unary, widened
from .parts import isinf, round, signbit, with_sign

__all__ = ["acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "expm1"]
__all__ += ["hypot", "log1p", "log2", "log10", "logaddexp", "reciprocal", "sinh", "tan"]


def _of_floats(name: str, compute: Callable[..., GraphValue]) -> Callable[..., GraphValue]:
    """Make a function of one float or of two, computed in float32 or float64."""

    def function(one: Any, *more: Any) -> GraphValue:
        numbers = operands(name, "floating", one, *more) if more else (admitted(name, "floating", one),)
        return compute(*map(widened, numbers)).astype(numbers[0].elem_type)

    return array_function(function, name)


def _log1p(x: GraphValue) -> GraphValue:
    """Return log(1 + x).

    With u = 1 + x rounded, log(u) x / (u - 1) corrects the rounding (Goldberg 1991, theorem 4).
    """
    u = 1.0 + x
    return where(~equal(u, 1.0) & ~equal(u, math.inf), log(u) * (x / (u - 1.0)), x)


def _expm1(x: GraphValue) -> GraphValue:
    """Return exp(x) - 1.

    With u = exp(x) rounded, (u - 1) x / log(u) corrects the rounding (Higham 2002, section 1.14.1).
    """
    u = exp(x)
    near_zero = (u - 1.0) * (x / log(u))
    return where(less(0.0, abs(u - 1.0)), where(less(abs(x), 1.0), near_zero, u - 1.0), x)


def _logarithm(base: int) -> Callable[[GraphValue], GraphValue]:
    """Make the logarithm to a base; that of a power of the base is whole."""

    def compute(x: GraphValue) -> GraphValue:
        wide = x.astype("float64")
        quotient = log(wide) / math.log(base)
        whole = round(quotient)
        # log(1000) / log(10) is 2.9999999999999996, which `floor` would make 2.
        return where(equal(pow(float(base), whole), wide), whole, quotient).astype(x.elem_type)

    return compute


def _logaddexp(one: GraphValue, other: GraphValue) -> GraphValue:
    """Return log(exp(one) + exp(other))."""
    larger = maximum(one, other)
    return where(
        equal(one, other), larger + math.log(2), larger + _log1p(exp(minimum(one, other) - larger))
    )  # the difference of two equal infinities is NaN


def _hypot(one: GraphValue, other: GraphValue) -> GraphValue:
    """Return the square root of the sum of two squares, which do not overflow; inf beside a NaN is inf."""
    one, other = abs(one), abs(other)
    larger = maximum(one, other)
    ratio = minimum(one, other) / where(
        equal(larger, 0.0), larger.graph.constant(1.0, larger.elem_type), larger
    )
    length = larger * sqrt(1.0 + ratio * ratio)
    return where(isinf(one) | isinf(other), math.inf, length)


log1p, expm1 = _of_floats("log1p", _log1p), _of_floats("expm1", _expm1)
log2, log10 = _of_floats("log2", _logarithm(2)), _of_floats("log10", _logarithm(10))
logaddexp, hypot = _of_floats("logaddexp", _logaddexp), _of_floats("hypot", _hypot)


@array_function
def reciprocal(value: GraphValue) -> GraphValue:
    """Return 1 divided by a float."""
    return 1.0 / admitted("reciprocal", "floating", value)


_LARGE = 2.0**28
"""From here on x^2 + 1 is x^2 in float64."""
_HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
"""pi / 2 in three parts, of which the first two have 33 bits (fdlibm, e_rem_pio2.c)."""


def _one_operator(name: str, formula: Callable[[GraphValue], GraphValue]) -> Callable[[Any], GraphValue]:
    """Make a function that is one operator of ONNX, and `formula` in float64."""

    def function(value: Any) -> GraphValue:
        number = admitted(name, "floating", value)
        if number.elem_type == "float64":
            return formula(number)
        return unary(name.capitalize(), name, "floating", number)

    return array_function(function, name)


def _odd(formula: Callable[[GraphValue], GraphValue]) -> Callable[[GraphValue], GraphValue]:
    """Make a function with f(-x) = -f(x) out of a formula for x >= 0."""
    return lambda x: with_sign(formula(abs(x)), x)


def _tan(x: GraphValue) -> GraphValue:
    """For x up to 1e6, x - n pi / 2 is in [-pi / 4, pi / 4], where neither sin nor cos loses digits."""
    n = round(x * (2 / math.pi))
    rest = x
    for part in _HALF_PI:
        rest = rest - n * part
    sine, cosine = sin(rest), cos(rest)
    is_even = equal(round(n * 0.5) * 2.0, n)
    reduced = where(is_even, sine / cosine, -(cosine / sine))
    return where(less(x, 1e6), reduced, sin(x) / cos(x))


def _atan(x: GraphValue) -> GraphValue:
    """The arc tangent of float32, and a step of Newton's method in float64."""
    is_large = less(1.0, x)
    t = where(is_large, 1.0 / x, x)
    near = unary("Atan", "atan", "floating", t.astype("float32")).astype("float64")
    tangent = sin(near) / cos(near)
    result = near + (t - tangent) / (1.0 + t * tangent)
    return where(is_large, math.pi / 2 - result, result)


def _sinh(x: GraphValue) -> GraphValue:
    power, half = expm1(x), exp(x * 0.5)
    return where(less(x, 20.0), (power + power / (power + 1.0)) * 0.5, half * 0.5 * half)


def _cosh(x: GraphValue) -> GraphValue:
    half = exp(abs(x) * 0.5)  # whose square may overflow, where half of it does not
    return half * 0.5 * half + 0.5 / (half * half)


def _asinh(x: GraphValue) -> GraphValue:
    square = x * x
    return where(less(x, _LARGE), log1p(x + square / (1.0 + sqrt(square + 1.0))), log(x) + math.log(2))


def _acosh(x: GraphValue) -> GraphValue:
    t = x - 1.0
    return where(less(x, _LARGE), log1p(t + sqrt(t) * sqrt(t + 2.0)), log(x) + math.log(2))


tan = _one_operator("tan", _odd(_tan))
atan = _one_operator("atan", _odd(_atan))
asin = _one_operator("asin", lambda x: atan(x / sqrt((1.0 - x) * (1.0 + x))))
acos = _one_operator("acos", lambda x: atan(sqrt((1.0 - x) / (1.0 + x))) * 2.0)
sinh, cosh = _one_operator("sinh", _odd(_sinh)), _one_operator("cosh", _cosh)
asinh, acosh = _one_operator("asinh", _odd(_asinh)), _one_operator("acosh", _acosh)
atanh = _one_operator("atanh", _odd(lambda x: log1p(2.0 * x / (1.0 - x)) * 0.5))


@array_function
def atan2(one: Any, other: Any) -> GraphValue:
    """Return the angle of the point (other, one), from -pi to pi."""
    first, second = operands("atan2", "floating", one, other)
    y, x = widened(first), widened(second)
    height, width = abs(y), abs(x)
    larger = maximum(height, width)
    is_whole = equal(height, width)  # both 0, or both infinite, have no ratio
    ratio = minimum(height, width) / larger
    ratio = where(
        is_whole, where(equal(larger, 0.0), larger, larger.graph.constant(1.0, larger.elem_type)), ratio
    )
    angle = atan(ratio)
    angle = where(less(width, height), math.pi / 2 - angle, angle)
    angle = where(signbit(x), math.pi - angle, angle)
    return with_sign(angle, y).astype(first.elem_type)
