"""Trigonometric and hyperbolic functions, and their inverses.

onnxruntime's CPU provider has kernels for float32. In float64 these are formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sdpa_xp_export._arrays.elementwise import (
    abs,
    cos,
    equal,
    exp,
    less,
    log,
    maximum,
    minimum,
    sin,
    sqrt,
    where,
)
from sdpa_xp_export._arrays.exponentials import expm1, log1p
from sdpa_xp_export._arrays.operators import admitted, array_function, operands, unary, widened
from sdpa_xp_export._arrays.parts import round, signbit, with_sign
from sdpa_xp_export._graph.graph import GraphValue

__all__ = ["acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "sinh", "tan"]

_LARGE = 2.0**28
"""From here on x^2 + 1 is x^2 in float64."""
_HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
"""pi / 2 in three parts, of which the first two have 33 bits (fdlibm, e_rem_pio2.c)."""


def _of_floats(name: str, formula: Callable[[GraphValue], GraphValue]) -> Callable[[Any], GraphValue]:
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


tan = _of_floats("tan", _odd(_tan))
atan = _of_floats("atan", _odd(_atan))
asin = _of_floats("asin", lambda x: atan(x / sqrt((1.0 - x) * (1.0 + x))))
acos = _of_floats("acos", lambda x: atan(sqrt((1.0 - x) / (1.0 + x))) * 2.0)
sinh, cosh = _of_floats("sinh", _odd(_sinh)), _of_floats("cosh", _cosh)
asinh, acosh = _of_floats("asinh", _odd(_asinh)), _of_floats("acosh", _acosh)
atanh = _of_floats("atanh", _odd(lambda x: log1p(2.0 * x / (1.0 - x)) * 0.5))


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
