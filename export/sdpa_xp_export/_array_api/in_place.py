"""Operators in place, such as `x += y`, and operators with a NumPy array or a NumPy number on the left.

`x += y` changes no array. It assigns the sum to the name `x`, both for a value and for a NumPy array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sdpa_xp._checks import message
from sdpa_xp_export._graph.function_hints import function_hint
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.spec import SymbolicShape

_OPERATORS = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "power", "matmul"),
    *("left_shift", "right_shift", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
)
"""The functions of NumPy that compute operators."""
_STANDARD_NAMES = {
    "power": "pow",
    "left_shift": "bitwise_left_shift",
    "right_shift": "bitwise_right_shift",
}
"""The standard's names for these functions, if they differ."""


def in_place(value: GraphValue, result: GraphValue) -> GraphValue:
    """Return the result of an operator in place, which has the dtype and the shape of its first operand."""
    if not value.graph.mixes_kinds:
        _check(result, value.dtype, value.shape)
    return result


def of_ufunc(
    value: GraphValue,
    ufunc: np.ufunc,
    method: str,
    inputs: tuple[Any, ...],
    out: tuple[Any, ...] = (),
    **keywords: Any,
) -> Any:
    """Compute a NumPy operator as a function of values; `out` is the first operand of an in-place operator."""
    name = ufunc.__name__
    if name not in _OPERATORS or method != "__call__" or keywords or (out and out[0] is not inputs[0]):
        rule = f"a value of a graph must not go to `numpy.{name}`"
        hint = function_hint(name, value.graph.namespace)
        raise TypeError(message(value.graph.function, rule, {"value": value.name}, hint))
    function = getattr(value.graph.namespace, _STANDARD_NAMES.get(name, name))
    result = function(*(_operand(value, operand) for operand in inputs))
    if out:
        _check(result, out[0].dtype.name, out[0].shape)
    return result


def _operand(value: GraphValue, operand: Any) -> Any:
    """Convert an operand of NumPy to one that a Python operator can combine with a value."""
    if isinstance(operand, np.ndarray):
        return value.graph.operand(operand)
    if not isinstance(operand, np.generic):
        return operand
    number = isinstance(operand, float) or value.graph.mixes_kinds
    return operand.item() if number else value.graph.operand(np.asarray(operand))


def _check(result: GraphValue, dtype: str, shape: SymbolicShape) -> None:
    """Refuse an in-place result whose dtype or shape differs from the operand that it replaces."""
    rule = "an operator in place must leave its first operand the dtype and the shape"
    hint = "Write x = x + y for x += y."
    if result.dtype != dtype:
        got = {"dtype": dtype, "dtype of the result": result.dtype}
        raise TypeError(message(result.graph.function, rule, got, hint))
    if result.shape != shape:
        shapes = {"shape": shape, "shape of the result": result.shape}
        raise ValueError(message(result.graph.function, rule, shapes, hint))
