"""Division as in Python and NumPy. Two rules differ from ONNX and onnxruntime.

- The quotient is rounded down, and the remainder has the sign of the divisor. ONNX rounds the quotient of
  integers towards 0.
- An integer divided by 0 is 0, and the smallest integer divided by -1 is the smallest integer. onnxruntime
  ends the process, or fails, for both.
"""

from __future__ import annotations

from typing import Any

from sdpa_xp.errors import Message
from sdpa_xp_export._array_api.dispatch import array_function
from sdpa_xp_export._array_api.elementwise import equal, less, negative, where
from sdpa_xp_export._array_api.operators import binary, computed, elementwise, operands
from sdpa_xp_export._dtypes.promotion import FLOATING, SIGNED
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export._graph.shapes import joint_shape


@array_function
def divide(one: Any, other: Any) -> GraphValue:
    """Divide floats."""
    return binary("Div", "divide", "floating", one, other)


@array_function
def floor_divide(one: Any, other: Any) -> GraphValue:
    """Divide and round down."""
    first, second = operands("floor_divide", "numeric", one, other)
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
    dtype, shape = one.elem_type, joint_shape(one.dims, other.dims)
    if dtype in ("float16", "bfloat16"):
        one, other = one.astype("float32"), other.astype("float32")
    rest = computed("Mod", one, other, shape=shape, fmod=1)
    opposite = ~equal(rest, 0.0) & ((rest < 0.0) ^ (other < 0.0))
    exact = (one - rest) / other
    exact = where(opposite, exact - 1.0, exact)
    quotient = computed("Floor", exact, shape=shape)
    quotient = where(exact - quotient > 0.5, quotient + 1.0, quotient)
    quotient = where(equal(other, 0.0), one / other, quotient)
    return quotient.astype(dtype), where(opposite, rest + other, rest).astype(dtype)
