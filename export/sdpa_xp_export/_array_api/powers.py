"""Powers and shifts, exact for integers of any size; ONNX's Pow of integers goes through floats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdpa_xp.checks import message
from sdpa_xp_export._array_api import pieces
from sdpa_xp_export._array_api.arithmetic import compared, computed, elementwise, equal, operands
from sdpa_xp_export._array_api.elementwise import minimum, where
from sdpa_xp_export._dtypes.promotion import FLOATING, SIGNED, bits
from sdpa_xp_export._graph.shapes import joint_shape

if TYPE_CHECKING:
    from sdpa_xp_export._graph.value import Value


def power(one: Any, other: Any) -> Value:
    """Raise one operand to the power of the other; integers wrap, as in NumPy."""
    base, exponent = operands("pow", "numeric", one, other)
    if base.dtype in FLOATING:
        return elementwise("Pow", base, exponent)
    if not isinstance(other, int):
        return _of_integers(base, exponent)
    if other < 0:
        rule = "an integer must not be raised to a negative power"
        raise ValueError(message(base.graph.function, rule, {"exponent": other}, "Convert it to a float."))
    return _to_known(base, other)


def _to_known(base: Value, exponent: int) -> Value:
    """Raise integers to a known power by repeated squaring."""
    found = base.graph.constant(1, base.dtype) if exponent else base * 0 + 1
    while exponent:
        if exponent & 1:
            found = found * base
        exponent >>= 1
        if exponent:
            base = base * base
    return found


def _of_integers(base: Value, exponent: Value) -> Value:
    """Raise integers to integer powers by repeated squaring, in a Loop over the bits of the exponents."""
    graph, dtype = base.graph, base.dtype
    states = (base * 0 + exponent * 0 + 1, base, exponent)
    body, number = graph.body(), next(graph.count)
    body.input(f"bit_{number}", "int64", ())
    body.input(f"goes_on_{number}", "bool", ())
    found, factor, left = (
        body.input(f"{name}_{number}", dtype, state.shape)
        for name, state in zip(("power", "factor", "exponent"), states, strict=True)
    )
    halved = elementwise("Div", left, body.constant(2, dtype))
    steps = [found * ((factor - 1) * (left % 2) + 1), factor * factor, halved]
    made = graph.add_many(
        "Loop",
        graph.constant(bits(dtype), "int64"),
        None,
        *states,
        outputs=[(dtype, state.shape) for state in states],
        body=body.subgraph([_any(~equal(halved, 0)), *steps]),
    )
    return made[0]


def _any(conditions: Value) -> Value:
    """Return whether any of the conditions holds; False if there are none."""
    graph = conditions.graph
    flat = pieces.reshape_to(conditions.astype("uint8"), graph.constant([-1], "int64"), ("all",))
    flat = pieces.join([graph.constant([0], "uint8"), flat], length="all_and_one")
    return pieces.scalar(pieces.reduce("ReduceMax", flat)).astype("bool")


def left_shift(one: Any, other: Any) -> Value:
    """Shift to the left; a shift by all bits or more gives 0."""
    number, count = _shift("bitwise_left_shift", one, other)
    wide = count.astype("uint64")
    shifted = _shifted("LEFT", number.astype("uint64"), wide)
    return where(compared("Less", "less", wide, 64), shifted, 0).astype(number.dtype)


def right_shift(one: Any, other: Any) -> Value:
    """Shift to the right, rounding down; a shift by all bits or more gives 0, or -1 below 0."""
    number, count = _shift("bitwise_right_shift", one, other)
    if number.dtype not in SIGNED:
        return _beyond_last_bit(number, count)
    below = compared("Less", "less", number, 0)
    found = _beyond_last_bit(where(below, -1 - number, number), count)
    return where(below, -1 - found, found)


def _shift(name: str, one: Any, other: Any) -> tuple[Value, Value]:
    """Return the number and the count of bits; a count below 0 is refused where it is known."""
    number, count = operands(name, "integer", one, other)
    if isinstance(other, int) and other < 0:
        raise ValueError(
            message(number.graph.function, f"the count of `{name}` must be at least 0", {"count": other})
        )
    return number, count


def _beyond_last_bit(number: Value, count: Value) -> Value:
    """Shift numbers that are not below 0 to the right; a shift by all bits or more gives 0."""
    wide = count.astype("uint64")
    shifted = _shifted("RIGHT", number.astype("uint64"), wide)
    return where(compared("Less", "less", wide, 64), shifted, 0).astype(number.dtype)


def _shifted(direction: str, number: Value, count: Value) -> Value:
    """Write BitShift of 64 bits, by at most 63: C++ leaves more undefined."""
    shape = joint_shape(number.shape, count.shape)
    return computed("BitShift", number, minimum(count, 63), shape=shape, direction=direction)
