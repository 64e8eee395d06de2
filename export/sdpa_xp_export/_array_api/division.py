"""Division as Python has it: the quotient is rounded down, and the remainder has the sign of the divisor.

ONNX rounds the quotient of integers towards 0. onnxruntime ends the process, or fails, where the divisor of an
integer is 0, and where the smallest integer is divided by -1; here they give 0, and the smallest integer again,
as in NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdpa_xp.checks import message
from sdpa_xp_export._array_api.arithmetic import (
    binary,
    compared,
    computed,
    elementwise,
    equal,
    negative,
    operands,
)
from sdpa_xp_export._array_api.elementwise import where
from sdpa_xp_export._dtypes.promotion import FLOATING, SIGNED
from sdpa_xp_export._graph.shapes import joint_shape

if TYPE_CHECKING:
    from sdpa_xp_export._graph.value import Value


def divide(one: Any, other: Any) -> Value:
    """Divide floats."""
    return binary("Div", "divide", "floating", one, other)


def floor_divide(one: Any, other: Any) -> Value:
    """Divide and round down."""
    first, second = operands("floor_divide", "numeric", one, other)
    if first.dtype in FLOATING:
        return _of_floats(first, second)[0]
    known = _known(first, other)
    if known is not None:
        return negative(first) if known == -1 else _quotient(first, second, known)
    found = where(equal(second, 0), 0, _quotient(first, _safe(second), None))
    return where(equal(second, -1), negative(first), found) if second.dtype in SIGNED else found


def remainder(one: Any, other: Any) -> Value:
    """Return the remainder, which has the sign of the divisor."""
    first, second = operands("remainder", "numeric", one, other)
    if first.dtype in FLOATING:
        return _of_floats(first, second)[1]
    if _known(first, other) not in (None, -1):
        return elementwise("Mod", first, second)
    return where(equal(second, 0), 0, elementwise("Mod", first, _safe(second)))


def _known(first: Value, divisor: Any) -> int | None:
    """Return a divisor that is a Python integer, else None; 0 is refused."""
    if not isinstance(divisor, int):
        return None
    if divisor == 0:
        rule = "an integer must not be divided by 0"
        raise ZeroDivisionError(message(first.graph.function, rule, {"divisor": 0}))
    return divisor


def _safe(divisor: Value) -> Value:
    """Replace the divisors 0 and -1 by 1."""
    found = where(equal(divisor, 0), 1, divisor)
    return where(equal(divisor, -1), 1, found) if divisor.dtype in SIGNED else found


def _quotient(one: Value, other: Value, known: int | None) -> Value:
    """Divide integers with Div, and subtract 1 where Div rounded up."""
    found = elementwise("Div", one, other)
    if one.dtype not in SIGNED:
        return found
    left = elementwise("Sub", one, elementwise("Mul", found, other))
    if known is None:
        opposite = compared("Less", "less", left, 0) ^ compared("Less", "less", other, 0)
        up = opposite & ~equal(left, 0)
    else:
        up = compared("Less" if known > 0 else "Greater", "less", left, 0)
    return elementwise("Sub", found, up.astype(found.dtype))


def _of_floats(one: Value, other: Value) -> tuple[Value, Value]:
    """Return the quotient rounded down and the remainder, by the steps of NumPy's `npy_divmod`.

    The quotient follows from the remainder, which is exact: 1.0 // 0.1 is 9, though 1.0 / 0.1 is 10.
    """
    dtype, shape = one.dtype, joint_shape(one.shape, other.shape)
    if dtype in ("float16", "bfloat16"):
        one, other = one.astype("float32"), other.astype("float32")
    left = computed("Mod", one, other, shape=shape, fmod=1)
    opposite = ~equal(left, 0.0) & ((left < 0.0) ^ (other < 0.0))
    exact = (one - left) / other
    exact = where(opposite, exact - 1.0, exact)
    found = computed("Floor", exact, shape=shape)
    found = where(exact - found > 0.5, found + 1.0, found)
    found = where(equal(other, 0.0), one / other, found)
    return found.astype(dtype), where(opposite, left + other, left).astype(dtype)
