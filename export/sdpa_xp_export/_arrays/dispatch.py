"""How a function becomes a node: who computes, how operands are promoted, and which dtype has a kernel.

If a value of the graph is among the arguments, the graph computes, else the library of the arrays.

Dtypes follow the array API standard. A Python scalar gets the dtype of the array that it is combined with. Two
kinds of dtypes raise an error (the standard leaves the result undefined, and libraries differ), except in
functions of the indices, which follow FlexAttention: there a bool becomes a number and an integer a float.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import array_api_compat
import numpy as np

from sdpa_xp.errors import ArgumentTypeError, Message

from .._dtypes.dtype import CATEGORIES, FLOATING, INTEGERS, UNSIGNED, holds, joint, joint_of_kinds, of_scalar
from .._graph import FloatOfLengths, Graph, GraphValue, Length
from ..spec import SymbolicShape

# Operators without a kernel for a dtype on onnxruntime's CPU provider, and the dtype to compute in instead.
# Measured on the releases 1.23 to 1.32 at opsets 17 to 27: an entry lacks a kernel in at least one of them.
_MOVING = ("Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that only move elements: they have kernels for every dtype."""

_MISSING = {
    "Where": ("int8", "int16", "uint16", "uint32", "uint64"),
    "Max": ("int8", "int16", "uint8", "uint16"),
    "Min": ("int8", "int16", "uint8", "uint16"),
    "MatMul": ("int8", "int16", "uint8", "uint16"),
    "Neg": UNSIGNED,
    "ReduceMax": ("int16", "uint16", "uint32"),
    "ReduceMin": ("int16", "uint16", "uint32"),
}

_WIDER = {
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",  # the same bits: sums, products and choices stay right, an order would not
}

Scalar: TypeAlias = bool | int | float | Length | FloatOfLengths
"""What takes the dtype of the array beside it."""
P = ParamSpec("P")
T = TypeVar("T")


def array_function(function: Callable[P, T], name: str = "") -> Callable[P, T]:
    """Make a function of values a function of the namespace, whose arguments may also be other arrays.

    Without a value among the arguments, the function of that name in the arrays' own library is called.
    """
    function.__name__ = name or function.__name__

    @functools.wraps(function)
    def dispatched(*arguments: Any, **keywords: Any) -> Any:
        graph = graph_of(arguments)
        if graph is None:
            arrays = [leaf for leaf in _leaves(arguments) if is_array_elsewhere(leaf)]
            # A number of NumPy counts as an array of NumPy only among numbers: torch computes with it itself.
            arrays = arrays or [np.asarray(leaf) for leaf in _leaves(arguments) if isinstance(leaf, np.generic)]
            namespace = array_api_compat.array_namespace(*arrays)
            return getattr(namespace, function.__name__)(*arguments, **keywords)
        # Keywords stay as they are: `clip`, which takes arrays by keyword, passes them on by position.
        compute: Callable[..., Any] = function
        return compute(*(_as_values(graph, argument) for argument in arguments), **keywords)

    return dispatched


def graph_of(arguments: Sequence[Any]) -> Graph | None:
    """Return the graph of the first value or length among arguments, and in lists of them."""
    graphs = (
        leaf.graph for leaf in _leaves(arguments) if isinstance(leaf, GraphValue | Length | FloatOfLengths)
    )
    return next((graph for graph in graphs if isinstance(graph, Graph)), None)


def is_array_elsewhere(operand: object) -> bool:
    """Return whether `operand` is an array of some library, and neither a number nor a value of a graph."""
    known = isinstance(operand, numbers.Number | GraphValue)
    return not known and bool(array_api_compat.is_array_api_obj(operand))


def _leaves(arguments: Sequence[Any]) -> Iterator[Any]:
    for argument in arguments:
        yield from _leaves(argument) if isinstance(argument, tuple | list) else (argument,)


def _as_values(graph: Graph, argument: Any) -> Any:
    if isinstance(argument, tuple | list):
        return type(argument)(_as_values(graph, element) for element in argument)
    is_python_float = isinstance(argument, float) and not graph.settings.numpy_floats_promote
    if isinstance(argument, np.generic) and not is_python_float:
        # It is an array of NumPy without axes.
        return argument.item() if graph.is_part else graph.from_array(argument)
    return graph.from_array(argument) if is_array_elsewhere(argument) else argument


def binary(op: str, name: str, category: str, one: Any, other: Any, dtype: str | None = None) -> GraphValue:
    """Write `op` of two operands: elementwise, with broadcasting and type promotion.

    Args:
        op: The operator of ONNX.
        name: The function of the standard, for messages.
        category: The dtypes that the function takes, a key of `CATEGORIES`.
        one: The left operand.
        other: The right operand; one of the two is a value.
        dtype: The dtype of the result, if it is not the dtype of the operands.
    """
    return elementwise(op, *operands(name, category, one, other), dtype=dtype)


def unary(op: str, name: str, category: str, value: GraphValue) -> GraphValue:
    """Write `op` of one operand; the result has its dtype and shape."""
    value = admitted(name, category, value)
    return computed(op, value, shape=value.dims)


def operands(name: str, category: str, one: Any, other: Any) -> tuple[GraphValue, GraphValue]:
    """Promote both operands to one dtype, and check that the dtype is in `category`."""
    first, second = promoted(name, one, other)
    return admitted(name, category, first), admitted(name, category, second)


def promoted(name: str, one: Any, other: Any) -> tuple[GraphValue, GraphValue]:
    """Promote both operands to one dtype; at least one of them is a value of the graph."""
    graph: Graph = (one if hasattr(one, "graph") else other).graph  # that of a value or of a length
    first, second = (_scalar(graph, operand) for operand in (one, other))
    if first is not None:
        value, scalar = _with_scalar(name, graph.operand(other), first)
        return scalar, value
    if second is not None:
        return _with_scalar(name, graph.operand(one), second)
    values = graph.operand(one), graph.operand(other)
    dtype = (joint_of_kinds if graph.is_part else joint)(values[0].elem_type, values[1].elem_type)
    if dtype is None:
        got = {"first dtype": values[0].elem_type, "second dtype": values[1].elem_type}
        rule = f"the operands of `{name}` must have dtypes that the array API promotes to one"
        raise ArgumentTypeError(graph.function, rule, got, "Convert one of them with `astype`.")
    return values[0].astype(dtype), values[1].astype(dtype)


def admitted(name: str, category: str, value: GraphValue) -> GraphValue:
    """Check that the function takes the dtype; in a function of the indices, convert it if needed."""
    if value.elem_type in CATEGORIES[category]:
        return value
    if value.graph.is_part and category == "floating":
        return value.astype(value.graph.settings.float_dtype)
    if value.graph.is_part and category == "numeric":
        return value.astype("int64")
    rule = f"the arguments of `{name}` must have dtypes that are {category}"
    raise ArgumentTypeError(
        value.graph.function, rule, {"dtype": value.elem_type}, "Convert the array with `astype`."
    )


def elementwise(op: str, one: GraphValue, other: GraphValue, dtype: str | None = None) -> GraphValue:
    """Write `op` of two values that have one dtype."""
    shape = one.graph.joint_shape(one.dims, other.dims)
    if one.elem_type == "float64":
        # onnxruntime folds a number that the result of a MatMul is multiplied with into the MatMul, as a
        # float32, and leaves out a product with a number that is 1 as a float32, such as 1 + 1e-9. So both
        # operands are negated: it does neither across Neg.
        if op in ("Mul", "Div") and (_scales_a_product(one, other) or _rounds_to(1.0, one, other)):
            one, other = _negated(one), _negated(other)
        # It also leaves out a sum with a number that is 0 as a float32, but not what is subtracted from it.
        elif op in ("Add", "Sub") and _rounds_to(0.0, other):
            number = _negated(other) if op == "Add" else other
            return _negated(computed("Sub", number, one, shape=shape))
        elif op == "Add" and _rounds_to(0.0, one):
            return _negated(computed("Sub", _negated(one), other, shape=shape))
    return computed(op, one, other, shape=shape, dtype=dtype)


def _negated(value: GraphValue) -> GraphValue:
    return computed("Neg", value, shape=value.dims)


def computed(
    op: str, *values: GraphValue, shape: SymbolicShape, dtype: str | None = None, **attributes: Any
) -> GraphValue:
    """Write `op` in a dtype that has a kernel, and convert the result back, or to `dtype`."""
    graph = values[0].graph
    inner = kernel_dtype(op, values[0])
    inputs = (value.astype(inner) for value in values)
    result = graph.add(op, *inputs, dtype=dtype or inner, shape=shape, **attributes)
    return result.astype(dtype or values[0].elem_type)


def _scales_a_product(one: GraphValue, other: GraphValue) -> bool:
    """Return whether one value is the result of a MatMul and the other a single number."""
    has_single = any(all(length == 1 for length in value.dims) for value in (one, other))
    return has_single and any(one.graph.is_product(value) for value in (one, other))


def _rounds_to(number: float, *values: GraphValue) -> bool:
    """Return whether one of the values is a single number that is `number` as a float32, but not as it is."""
    singles = (value.graph.single_number(value) for value in values)
    with np.errstate(over="ignore"):
        return any(
            single is not None and single != number and np.float32(single) == number for single in singles
        )


def kernel_dtype(op: str, value: GraphValue) -> str:
    """Return the dtype in which onnxruntime can compute `op` of `value`: the same, or a wider one.

    A Cast to the wider dtype and back loses nothing: integers wrap in both, and a result in bfloat16 is the
    result in float32 rounded once.
    """
    dtype, graph = value.elem_type, value.graph
    if dtype == "bfloat16":  # of the providers, CUDA computes in it, and the others only move it
        is_computed = graph.runtime.provider == "cuda" and not graph.is_part
        return dtype if op in _MOVING or is_computed else "float32"
    if graph.runtime.is_openvino and _WIDER.get(dtype) == "int32":
        return "int32"
    if dtype not in _MISSING.get(op, ()):
        return dtype
    return _WIDER[dtype]


def widened(value: GraphValue) -> GraphValue:
    """Convert half precision to float32, in which formulas of several nodes are computed."""
    return value.astype("float32") if value.elem_type in ("float16", "bfloat16") else value


def _scalar(graph: Graph, operand: Any) -> Scalar | None:
    """Return a Python scalar, or None if `operand` is an array.

    A scalar of NumPy counts as an array without axes. There are two exceptions: a float64, which is a float of
    Python unless the caller has NumPy arrays, and any scalar of NumPy in a function of the indices.
    """
    if isinstance(operand, bool | Length | FloatOfLengths):
        return operand
    is_float = isinstance(operand, float) and not graph.settings.numpy_floats_promote
    if isinstance(operand, np.generic) and not is_float and not graph.is_part:
        return None
    if isinstance(operand, np.bool_):
        return bool(operand)
    if isinstance(operand, numbers.Integral):
        return int(operand)
    return float(operand) if isinstance(operand, numbers.Real) else None


def _with_scalar(name: str, value: GraphValue, scalar: Scalar) -> tuple[GraphValue, GraphValue]:
    """Return `value` and a constant of `scalar`, which takes the dtype of `value`."""
    graph, dtype = value.graph, value.elem_type
    is_float = isinstance(scalar, float | FloatOfLengths)
    if dtype not in (FLOATING if is_float else of_scalar(scalar)):
        if not graph.is_part:
            rule = f"a Python scalar in `{name}` must fit the kind of the array's dtype"
            got = {"scalar": repr(scalar), "dtype": dtype}
            raise ArgumentTypeError(graph.function, rule, got, "Convert the array with `astype`.")
        if not isinstance(scalar, bool):
            dtype = graph.settings.float_dtype if is_float else "int64"
    if isinstance(scalar, Length | FloatOfLengths):
        return value.astype(dtype), graph.operand(scalar).astype(dtype)
    if dtype in INTEGERS and not holds(dtype, int(scalar)):
        rule = f"a Python integer in `{name}` must be within the range of the dtype of the array"
        raise OverflowError(Message(graph.function, rule, {"integer": scalar, "dtype": dtype}))
    if dtype in INTEGERS:
        graph.check_integers(name, scalar)
    try:
        return value.astype(dtype), graph.constant(scalar, dtype)
    except OverflowError as error:  # an integer that no float holds
        rule = f"a Python integer in `{name}` must be within the range of the dtype of the array"
        raise OverflowError(Message(graph.function, rule, {"dtype": dtype})) from error
