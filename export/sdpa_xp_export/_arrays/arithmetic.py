"""Division, powers and shifts as in Python and NumPy, exact for integers of any size; functions of floats.

Division differs from ONNX and onnxruntime in two rules:

- The quotient is rounded down, and the remainder has the sign of the divisor. ONNX rounds the quotient of
  integers towards 0.
- An integer divided by 0 is 0, and the smallest integer divided by -1 is the smallest integer. onnxruntime
  ends the process, or fails, for both.

ONNX's Pow of integers goes through floats; here they are multiplied.

ONNX has no operator for some exponentials, logarithms and roots. Half precision is computed in float32, and
rounded once. For trigonometric and hyperbolic functions onnxruntime's CPU provider has kernels for float32, and
in float64 they are formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sdpa_xp.errors import ArgumentValueError, Message

from .._dtypes.dtype import FLOATING, SIGNED, bits
from .._graph import GraphValue
from . import ops
from .dispatch import admitted, array_function, binary, computed, elementwise, operands, unary, widened
from .elementwise import (
    abs,
    cos,
    equal,
    exp,
    isinf,
    less,
    log,
    maximum,
    minimum,
    negative,
    one_operator,
    round,
    signbit,
    sin,
    sqrt,
    where,
    with_sign,
)
from .manipulation import concat, reshape

__all__ = ["bitwise_left_shift", "bitwise_right_shift", "floor_divide", "pow", "remainder"]
__all__ += ["acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "expm1"]
__all__ += ["hypot", "log1p", "log2", "log10", "logaddexp", "reciprocal", "sinh", "tan"]


@array_function
def floor_divide(one: Any, other: Any, *, exact: bool = True) -> GraphValue:
    """Divide and round down; if not `exact`, for counts divided by positive numbers, which ONNX rounds down."""
    first, second = operands("floor_divide", "numeric", one, other)
    if not exact:
        return elementwise("Div", first, second)
    if first.elem_type in FLOATING:
        return _quotient_and_remainder_of_floats(first, second)[0]
    known = _known_divisor(first, other)
    if known is not None:
        return negative(first) if known == -1 else _rounded_down(first, second, known)
    quotient = where(equal(second, 0), 0, _rounded_down(first, _safe_divisor(second), None))
    return where(equal(second, -1), negative(first), quotient) if second.elem_type in SIGNED else quotient


@array_function
def remainder(one: Any, other: Any) -> GraphValue:
    """Return the remainder, which has the sign of the divisor."""
    first, second = operands("remainder", "numeric", one, other)
    if first.elem_type in FLOATING:
        return _quotient_and_remainder_of_floats(first, second)[1]
    if _known_divisor(first, other) not in (None, -1):
        return elementwise("Mod", first, second)
    return where(equal(second, 0), 0, elementwise("Mod", first, _safe_divisor(second)))


def _known_divisor(first: GraphValue, divisor: Any) -> int | None:
    """Return a divisor that is a Python integer, else None; 0 is refused."""
    if not isinstance(divisor, int):
        return None
    if divisor == 0:
        rule = "an integer must not be divided by 0"
        raise ZeroDivisionError(Message(first.graph.function, rule, {"divisor": 0}))
    return divisor


def _safe_divisor(divisor: GraphValue) -> GraphValue:
    """Replace the divisors 0 and -1 by 1."""
    safe = where(equal(divisor, 0), 1, divisor)
    return where(equal(divisor, -1), 1, safe) if divisor.elem_type in SIGNED else safe


def _rounded_down(one: GraphValue, other: GraphValue, known: int | None) -> GraphValue:
    """Divide integers with Div, and subtract 1 where Div rounded up."""
    quotient = elementwise("Div", one, other)
    if one.elem_type not in SIGNED:
        return quotient
    rest = elementwise("Sub", one, elementwise("Mul", quotient, other))
    if known is None:
        opposite = less(rest, 0) ^ less(other, 0)
        rounded_up = opposite & ~equal(rest, 0)
    else:
        rounded_up = binary("Less" if known > 0 else "Greater", "less", "numeric", rest, 0, "bool")
    return elementwise("Sub", quotient, rounded_up.astype(quotient.elem_type))


def _quotient_and_remainder_of_floats(one: GraphValue, other: GraphValue) -> tuple[GraphValue, GraphValue]:
    """Return the quotient rounded down and the remainder, by the steps of NumPy's `npy_divmod`.

    The quotient follows from the remainder, which is exact: 1.0 // 0.1 is 9, though 1.0 / 0.1 is 10.
    """
    dtype, shape = one.elem_type, one.graph.joint_shape(one.dims, other.dims)
    one, other = widened(one), widened(other)
    rest = computed("Mod", one, other, shape=shape, fmod=1)
    opposite = ~equal(rest, 0.0) & ((rest < 0.0) ^ (other < 0.0))
    exact = (one - rest) / other
    exact = where(opposite, exact - 1.0, exact)
    quotient = computed("Floor", exact, shape=shape)
    quotient = where(exact - quotient > 0.5, quotient + 1.0, quotient)
    quotient = where(less(0.0, abs(quotient)), quotient, with_sign(abs(quotient), one / other))
    quotient = where(equal(other, 0.0), one / other, quotient)
    rest = where(opposite, rest + other, rest)
    rest = where(less(0.0, abs(rest)), rest, with_sign(abs(rest), other))  # -1.0 % 1.0 is 0.0, as is -0.0 % 1.0
    return quotient.astype(dtype), rest.astype(dtype)


@array_function
def pow(one: Any, other: Any) -> GraphValue:
    """Raise one operand to the power of the other; integers wrap, as in NumPy."""
    base, exponent = operands("pow", "numeric", one, other)
    if base.elem_type in FLOATING:
        return elementwise("Pow", base, exponent)
    if not isinstance(other, int):
        return _power_of_integers(base, exponent)
    if other < 0:
        rule = "an integer must not be raised to a negative power"
        raise ArgumentValueError(base.graph.function, rule, {"exponent": other}, "Convert it to a float.")
    return _known_power(base, other)


def _known_power(base: GraphValue, exponent: int) -> GraphValue:
    """Raise integers to a known power by repeated squaring."""
    power = base.graph.constant(1, base.elem_type) if exponent else base * 0 + 1  # x**0 has the shape of x
    while exponent:
        if exponent & 1:
            power = power * base
        exponent >>= 1
        if exponent:
            base = base * base
    return power


def _power_of_integers(base: GraphValue, exponent: GraphValue) -> GraphValue:
    """Raise integers to integer powers by repeated squaring, in a Loop over the bits of the exponents."""
    graph, dtype = base.graph, base.elem_type
    states = (base * 0 + exponent * 0 + 1, base, exponent)  # the power has the shape of both from the start on
    body = graph.loop_body()
    body.input("Bit", "int64", ())
    body.input("GoesOn", "bool", ())
    power, factor, left = (
        body.input(name, dtype, state.dims)
        for name, state in zip(("Power", "Factor", "Exponent"), states, strict=True)
    )
    halved = elementwise("Div", left, body.constant(2, dtype))
    steps = [power * ((factor - 1) * (left % 2) + 1), factor * factor, halved]
    outputs = graph.add_many(
        "Loop",
        graph.constant(bits(dtype), "int64"),
        graph.constant(value=True, dtype="bool"),  # without a condition, ONNX's evaluator takes no step
        *states,
        outputs=[(dtype, state.dims) for state in states],
        body=body.subgraph([_any(~equal(halved, 0)), *steps]),  # most exponents are small, so it ends early
    )
    return outputs[0]


def _any(conditions: GraphValue) -> GraphValue:
    """Return whether any of the conditions holds; False if there are none."""
    graph = conditions.graph
    flat = reshape(conditions.astype("uint8"), (-1,))
    flat = concat([graph.constant([0], "uint8"), flat])
    return ops.scalar(ops.reduce("ReduceMax", flat)).astype("bool")


@array_function
def bitwise_left_shift(one: Any, other: Any) -> GraphValue:
    """Shift to the left; a shift by all bits or more gives 0."""
    number, count = _number_and_count("bitwise_left_shift", one, other)
    return _shifted("LEFT", number, count)


@array_function
def bitwise_right_shift(one: Any, other: Any) -> GraphValue:
    """Shift to the right, rounding down; a shift by all bits or more gives 0, or -1 below 0."""
    number, count = _number_and_count("bitwise_right_shift", one, other)
    if number.elem_type not in SIGNED:
        return _shifted("RIGHT", number, count)
    # BitShift takes unsigned integers alone; -1 - x of a negative x has the inverted bits of x.
    below = less(number, 0)
    shifted = _shifted("RIGHT", where(below, -1 - number, number), count)
    return where(below, -1 - shifted, shifted)


def _number_and_count(name: str, one: Any, other: Any) -> tuple[GraphValue, GraphValue]:
    """Return the number and the count of bits; a known count below 0 is refused."""
    number, count = operands(name, "integer", one, other)
    if isinstance(other, int) and other < 0:
        raise ArgumentValueError(
            number.graph.function, f"the count of `{name}` must be at least 0", {"count": other}
        )
    return number, count


def _shifted(direction: str, number: GraphValue, count: GraphValue) -> GraphValue:
    """Shift numbers as 64 bits; a shift by 64 bits or more, which C++ leaves undefined, gives 0."""
    wide, shape = count.astype("uint64"), count.graph.joint_shape(number.dims, count.dims)
    bits_of = number.astype("uint64")
    shifted = computed("BitShift", bits_of, minimum(wide, 63), shape=shape, direction=direction)
    return where(less(wide, 64), shifted, 0).astype(number.elem_type)


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


tan = one_operator("tan", _odd(_tan))
atan = one_operator("atan", _odd(_atan))
asin = one_operator("asin", lambda x: atan(x / sqrt((1.0 - x) * (1.0 + x))))
acos = one_operator("acos", lambda x: atan(sqrt((1.0 - x) / (1.0 + x))) * 2.0)
sinh, cosh = one_operator("sinh", _odd(_sinh)), one_operator("cosh", _cosh)
asinh, acosh = one_operator("asinh", _odd(_asinh)), one_operator("acosh", _acosh)
atanh = one_operator("atanh", _odd(lambda x: log1p(2.0 * x / (1.0 - x)) * 0.5))


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
