"""Division, powers and shifts as in Python and NumPy, exact for integers of any size.

Division differs from ONNX and onnxruntime in two rules:

- The quotient is rounded down, and the remainder has the sign of the divisor. ONNX rounds the quotient of
  integers towards 0.
- An integer divided by 0 is 0, and the smallest integer divided by -1 is the smallest integer. onnxruntime
  ends the process, or fails, for both.

ONNX's Pow of integers goes through floats; here they are multiplied.
"""

from __future__ import annotations

from typing import Any

from sdpa_xp.errors import ArgumentValueError, Message

from .._dtypes.dtype import FLOATING, SIGNED, bits
from .._graph import GraphValue
from . import ops
from .elementwise import abs, equal, less, minimum, negative, where
from .manipulation import concat, reshape
from .operators import array_function, binary, computed, elementwise, operands
from .parts import with_sign

__all__ = ["bitwise_left_shift", "bitwise_right_shift", "divide", "floor_divide", "pow", "remainder"]


@array_function
def divide(one: Any, other: Any) -> GraphValue:
    """Divide floats."""
    return binary("Div", "divide", "floating", one, other)


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
    if dtype in ("float16", "bfloat16"):
        one, other = one.astype("float32"), other.astype("float32")
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
