"""Logarithms, exponentials and roots of floats that ONNX has no operator for.

Half precision is computed in float32, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sdpa_xp_export._arrays.arithmetic import pow
from sdpa_xp_export._arrays.elementwise import (
    abs,
    equal,
    exp,
    less,
    log,
    maximum,
    minimum,
    not_equal,
    sqrt,
    where,
)
from sdpa_xp_export._arrays.operators import admitted, array_function, operands, widened
from sdpa_xp_export._arrays.parts import isinf, round
from sdpa_xp_export._graph.graph import GraphValue

__all__ = ["expm1", "hypot", "log1p", "log2", "log10", "logaddexp", "reciprocal"]


def _unary(name: str, compute: Callable[[GraphValue], GraphValue]) -> Callable[[Any], GraphValue]:
    """Make a function of a float, computed in float32 or float64."""

    def function(value: Any) -> GraphValue:
        number = admitted(name, "floating", value)
        return compute(widened(number)).astype(number.elem_type)

    function.__name__ = name  # by which other libraries are asked for it
    return array_function(function)


def _binary(
    name: str, compute: Callable[[GraphValue, GraphValue], GraphValue]
) -> Callable[[Any, Any], GraphValue]:
    """Make a function of two floats, computed in float32 or float64."""

    def function(one: Any, other: Any) -> GraphValue:
        first, second = operands(name, "floating", one, other)
        return compute(widened(first), widened(second)).astype(first.elem_type)

    function.__name__ = name  # by which other libraries are asked for it
    return array_function(function)


def _log1p(x: GraphValue) -> GraphValue:
    """Return log(1 + x).

    With u = 1 + x rounded, log(u) x / (u - 1) corrects the rounding (Goldberg 1991, theorem 4).
    """
    u = 1.0 + x
    return where(not_equal(u, 1.0) & not_equal(u, math.inf), log(u) * (x / (u - 1.0)), x)


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


log1p, expm1 = _unary("log1p", _log1p), _unary("expm1", _expm1)
log2, log10 = _unary("log2", _logarithm(2)), _unary("log10", _logarithm(10))
logaddexp, hypot = _binary("logaddexp", _logaddexp), _binary("hypot", _hypot)


@array_function
def reciprocal(value: GraphValue) -> GraphValue:
    """Return 1 divided by a float."""
    return 1.0 / admitted("reciprocal", "floating", value)
