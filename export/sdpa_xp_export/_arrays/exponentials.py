"""Logarithms, exponentials and roots of floats that ONNX has no operator for.

Half precision is computed in float32, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sdpa_xp_export._arrays.arithmetic import pow
from sdpa_xp_export._arrays.elementwise import abs, equal, exp, less, log, maximum, minimum, sqrt, where
from sdpa_xp_export._arrays.operators import admitted, array_function, operands, widened
from sdpa_xp_export._arrays.parts import isinf, round
from sdpa_xp_export._graph.graph import GraphValue

__all__ = ["expm1", "hypot", "log1p", "log2", "log10", "logaddexp", "reciprocal"]


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
