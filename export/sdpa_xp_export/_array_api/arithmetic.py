"""Operators with one and two operands, written as nodes; dtypes follow the array API standard.

A Python scalar takes the dtype of the array beside it. Kinds of dtypes do not mix (the standard leaves that
undefined, and libraries differ), except in functions of the indices, which follow FlexAttention: there a bool
becomes a number and an integer a float.
"""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from sdpa_xp.checks import message
from sdpa_xp_export._dtypes.kernels import computable_dtype
from sdpa_xp_export._dtypes.promotion import CATEGORIES, INTEGERS, holds, joint, joint_of_kinds, of_scalar
from sdpa_xp_export._graph.lengths import Length
from sdpa_xp_export._graph.shapes import joint_shape
from sdpa_xp_export.spec import Shape

if TYPE_CHECKING:
    from sdpa_xp_export._graph.graph import Graph
    from sdpa_xp_export._graph.value import Value


def binary(op: str, name: str, category: str, one: Any, other: Any, dtype: str | None = None) -> Value:
    """Write `op` of two operands: elementwise, with broadcasting and type promotion."""
    return elementwise(op, *operands(name, category, one, other), dtype=dtype)


def unary(op: str, name: str, category: str, value: Value, **attributes: Any) -> Value:
    """Write `op` of one operand; the result has its dtype and shape."""
    value = admitted(name, category, value)
    return computed(op, value, shape=value.shape, **attributes)


def operands(name: str, category: str, one: Any, other: Any) -> tuple[Value, Value]:
    """Promote both operands to one dtype, and check that the dtype is in `category`."""
    first, second = together(name, one, other)
    return admitted(name, category, first), admitted(name, category, second)


def together(name: str, one: Any, other: Any) -> tuple[Value, Value]:
    """Promote both operands to one dtype; at least one of them is a value of the graph."""
    graph: Graph = (one if hasattr(one, "graph") else other).graph
    first, second = (_scalar(graph, each) for each in (one, other))
    if first is not None:
        two, scalar = _with_scalar(name, graph.operand(other), first)
        return scalar, two
    if second is not None:
        return _with_scalar(name, graph.operand(one), second)
    values = graph.operand(one), graph.operand(other)
    dtype = (joint_of_kinds if graph.mixes_kinds else joint)(values[0].dtype, values[1].dtype)
    if dtype is None:
        got = {"first dtype": values[0].dtype, "second dtype": values[1].dtype}
        rule = f"the operands of `{name}` must have dtypes that the array API promotes to one"
        raise TypeError(message(graph.function, rule, got, "Convert one of them with `astype`."))
    return values[0].astype(dtype), values[1].astype(dtype)


def admitted(name: str, category: str, value: Value) -> Value:
    """Check that the function takes the dtype; in a function of the indices, convert it if needed."""
    if value.dtype in CATEGORIES[category]:
        return value
    if value.graph.mixes_kinds and category == "floating":
        return value.astype(value.graph.real)
    if value.graph.mixes_kinds and category == "numeric":
        return value.astype("int64")
    rule = f"`{name}` must be of dtypes that are {category}"
    raise TypeError(
        message(value.graph.function, rule, {"dtype": value.dtype}, "Convert the array with `astype`.")
    )


def elementwise(op: str, one: Value, other: Value, dtype: str | None = None) -> Value:
    """Write `op` of two values that have one dtype.

    onnxruntime folds a number that the result of a MatMul is multiplied with into the MatMul, as a float32. In
    float64 both get the other sign, across which it does not.
    """
    if op in ("Mul", "Div") and one.dtype == "float64" and _scales_a_product(one, other):
        one, other = negative(one), negative(other)
    return computed(op, one, other, shape=joint_shape(one.shape, other.shape), dtype=dtype)


def computed(op: str, *values: Value, shape: Shape, dtype: str | None = None, **attributes: Any) -> Value:
    """Write `op` in a dtype that has a kernel, and convert the result back, or return it as `dtype`."""
    graph, own = values[0].graph, values[0].dtype
    inner = kernel_dtype(op, values[0])
    made = graph.add(op, *(x.astype(inner) for x in values), dtype=dtype or inner, shape=shape, **attributes)
    return made.astype(dtype or own)


def _scales_a_product(one: Value, other: Value) -> bool:
    """Return whether one value is the result of a MatMul and the other a single number."""
    numbers = [all(length == 1 for length in each.shape) for each in (one, other)]
    return any(numbers) and any(one.graph.is_product(each) for each in (one, other))


def kernel_dtype(op: str, value: Value) -> str:
    """Return the dtype in which onnxruntime can compute `op` of `value`."""
    found = computable_dtype(op, value.dtype, bfloat16=value.graph.computes_bfloat16)
    if found is None:
        rule = f"{op} must be of a dtype for which onnxruntime has a kernel, or a wider one"
        raise TypeError(message(value.graph.function, rule, {"dtype": value.dtype}))
    return found


def negative(value: Value) -> Value:
    """Write Neg; unsigned integers wrap, as in NumPy."""
    return unary("Neg", "negative", "numeric", value)


def compared(op: str, name: str, one: Any, other: Any) -> Value:
    """Write a comparison of two numbers."""
    return binary(op, name, "numeric", one, other, "bool")


def equal(one: Any, other: Any) -> Value:
    """Write Equal of two operands of any dtype."""
    return binary("Equal", "equal", "any", one, other, "bool")


def logical(op: str, name: str, one: Any, other: Any) -> Value:
    """Write And, Or or Xor of two conditions."""
    return binary(op, name, "boolean", one, other)


def bitwise(op: str, name: str, one: Any, other: Any) -> Value:
    """Write And, Or or Xor of two conditions, or of the bits of two integers."""
    first, second = operands(name, "integer or boolean", one, other)
    if first.dtype == "bool":
        return elementwise(op, first, second)
    _bits_need_opset(first, name)
    return elementwise(f"Bitwise{op}", first, second)


def invert(value: Value) -> Value:
    """Write Not of a condition, or BitwiseNot of an integer."""
    value = admitted("bitwise_invert", "integer or boolean", value)
    if value.dtype == "bool":
        return computed("Not", value, shape=value.shape)
    _bits_need_opset(value, "bitwise_invert")
    return computed("BitwiseNot", value, shape=value.shape)


def _bits_need_opset(value: Value, name: str) -> None:
    if value.graph.opset < 18:
        rule = f"`opset` must be at least 18 for `{name}` of integers"
        raise ValueError(message(value.graph.function, rule, {"opset": value.graph.opset}))


def _scalar(graph: Graph, given: Any) -> bool | int | float | Length | None:
    """Return a Python scalar, or None if `given` is an array.

    A scalar of NumPy is an array without axes, except a float64, which Python takes for a float; and except in
    functions of the indices.
    """
    if isinstance(given, bool | Length):
        return given
    if isinstance(given, np.generic) and not isinstance(given, float) and not graph.mixes_kinds:
        return None
    if isinstance(given, np.bool_):
        return bool(given)
    if isinstance(given, numbers.Integral):
        return int(given)
    return float(given) if isinstance(given, numbers.Real) else None


def _with_scalar(name: str, value: Value, scalar: bool | int | float | Length) -> tuple[Value, Value]:
    """Make a constant of `scalar`; it takes the dtype of `value`."""
    graph, dtype = value.graph, value.dtype
    if dtype not in of_scalar(scalar):
        if not graph.mixes_kinds:
            rule = f"a Python scalar in `{name}` must be of the kind of the array beside it"
            got = {"scalar": repr(scalar), "dtype": dtype}
            raise TypeError(message(graph.function, rule, got, "Convert the array with `astype`."))
        if not isinstance(scalar, bool):
            dtype = graph.real if isinstance(scalar, float) else "int64"
    if isinstance(scalar, Length):
        return value.astype(dtype), graph.operand(scalar).astype(dtype)
    if dtype in INTEGERS and not holds(dtype, int(scalar)):
        rule = f"a Python integer in `{name}` must be within the dtype of the array beside it"
        raise OverflowError(message(graph.function, rule, {"integer": scalar, "dtype": dtype}))
    try:
        return value.astype(dtype), graph.constant(scalar, dtype)
    except OverflowError as error:  # of an integer that no float holds
        rule = f"a Python integer in `{name}` must be within the dtype of the array beside it"
        raise OverflowError(message(graph.function, rule, {"dtype": dtype})) from error
