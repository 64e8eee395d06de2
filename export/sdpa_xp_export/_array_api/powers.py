"""Powers and shifts, exact for integers of any size; ONNX's Pow of integers goes through floats."""

from __future__ import annotations

from typing import Any

from sdpa_xp.errors import ArgumentValueError
from sdpa_xp_export._array_api import ops
from sdpa_xp_export._array_api.dispatch import array_function
from sdpa_xp_export._array_api.elementwise import equal, less, minimum, where
from sdpa_xp_export._array_api.operators import computed, elementwise, operands
from sdpa_xp_export._dtypes.promotion import FLOATING, SIGNED, bits
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export._graph.shapes import joint_shape


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
    power = base.graph.constant(1, base.elem_type) if exponent else base * 0 + 1
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
    states = (base * 0 + exponent * 0 + 1, base, exponent)
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
        body=body.subgraph([_any(~equal(halved, 0)), *steps]),
    )
    return outputs[0]


def _any(conditions: GraphValue) -> GraphValue:
    """Return whether any of the conditions holds; False if there are none."""
    graph = conditions.graph
    flat = ops.reshape_to(conditions.astype("uint8"), graph.constant([-1], "int64"), ("all",))
    flat = ops.join([graph.constant([0], "uint8"), flat], length="all_and_one")
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
    wide, shape = count.astype("uint64"), joint_shape(number.dims, count.dims)
    bits_of = number.astype("uint64")
    shifted = computed("BitShift", bits_of, minimum(wide, 63), shape=shape, direction=direction)
    return where(less(wide, 64), shifted, 0).astype(number.elem_type)
