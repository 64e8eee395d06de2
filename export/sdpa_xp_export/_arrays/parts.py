"""Rounding, signs, and what kind of number a float is: NaN, infinite or finite.

A result keeps the sign of a zero. onnxruntime's Where returns 0 for a -0 that it chooses where the condition
holds, but keeps a -0 where the condition does not hold. So a number that may be -0 stands last in `where`, or
its sign is multiplied to the result. Such a condition is no Not, for which onnxruntime swaps the two. ONNX
cannot read the sign of a NaN before opset 26; it counts as positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_xp.errors import ArgumentTypeError

from .._dtypes.dtype import FLOATING, INTEGERS, SIGNED
from .._graph import GraphValue
from .elementwise import abs, equal, floor, less, not_equal, where
from .operators import admitted, array_function, computed, operands

__all__ = ["ceil", "conj", "copysign", "isfinite", "isinf", "isnan", "nextafter", "real", "round", "sign"]
__all__ += ["signbit", "trunc"]


def _rounding(name: str, round_floats: Callable[[GraphValue], GraphValue]) -> Callable[[Any], GraphValue]:
    """Make a function that rounds floats; integers stay unchanged."""

    def function(value: Any) -> GraphValue:
        number = admitted(name, "numeric", value)
        return number if number.elem_type in INTEGERS else round_floats(number)

    return array_function(function, name)


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
def real(value: GraphValue) -> GraphValue:
    """Return the number itself, since a graph has no complex dtypes."""
    return admitted("real", "numeric", value)


@array_function
def conj(value: GraphValue) -> GraphValue:
    """Return the number itself, since a graph has no complex dtypes."""
    return admitted("conj", "numeric", value)


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
