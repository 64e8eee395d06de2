"""Operators in place, and the operators that NumPy starts with an array or a number on the left.

No array is written to: `x += y` gives the name `x` to the sum, for a value and for an array of NumPy alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sdpa_xp._checks import message
from sdpa_xp_export._array_api import division, elementwise, manipulation, powers
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.spec import SymbolicShape

_OF_UFUNCS = {
    "add": elementwise.add,
    "subtract": elementwise.subtract,
    "multiply": elementwise.multiply,
    "divide": division.divide,
    "floor_divide": division.floor_divide,
    "remainder": division.remainder,
    "power": powers.pow,
    "matmul": manipulation.matmul,
    "left_shift": powers.bitwise_left_shift,
    "right_shift": powers.bitwise_right_shift,
    "bitwise_and": elementwise.bitwise_and,
    "bitwise_or": elementwise.bitwise_or,
    "bitwise_xor": elementwise.bitwise_xor,
    "less": elementwise.less,
    "less_equal": elementwise.less_equal,
    "greater": elementwise.greater,
    "greater_equal": elementwise.greater_equal,
    "equal": elementwise.equal,
    "not_equal": elementwise.not_equal,
}
"""The functions of values, by the names of the functions that NumPy computes operators with."""


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
    """Compute what NumPy asks for as a function of values; `out` is the first operand of one in place."""
    function = _OF_UFUNCS.get(ufunc.__name__)
    if function is None or method != "__call__" or keywords or (out and out[0] is not inputs[0]):
        return NotImplemented
    result = function(*(_operand(value, operand) for operand in inputs))
    if out:
        _check(result, out[0].dtype.name, out[0].shape)
    return result


def _operand(value: GraphValue, operand: Any) -> Any:
    """Convert an operand of NumPy to what an operator of Python takes beside a value."""
    if isinstance(operand, np.ndarray):
        return value.graph.operand(operand)
    if not isinstance(operand, np.generic):
        return operand
    number = isinstance(operand, float) or value.graph.mixes_kinds
    return operand.item() if number else value.graph.operand(np.asarray(operand))


def _check(result: GraphValue, dtype: str, shape: SymbolicShape) -> None:
    """Refuse a result in place whose dtype or shape is not that of the operand that it replaces."""
    rule = "an operator in place must leave its first operand the dtype and the shape"
    hint = "Write x = x + y for x += y."
    if result.dtype != dtype:
        got = {"dtype": dtype, "dtype of the result": result.dtype}
        raise TypeError(message(result.graph.function, rule, got, hint))
    if result.shape != shape:
        shapes = {"shape": shape, "shape of the result": result.shape}
        raise ValueError(message(result.graph.function, rule, shapes, hint))
