"""The operators that NumPy starts, with an array or a number of NumPy on the left: `array + value`."""

from __future__ import annotations

from typing import Any

import numpy as np

from sdpa_xp.errors import ArgumentTypeError
from sdpa_xp_export._array_api.in_place import check_in_place
from sdpa_xp_export._graph.function_hints import function_hint
from sdpa_xp_export._graph.graph import GraphValue

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
        raise ArgumentTypeError(value.graph.function, rule, {"value": value.name}, hint)
    function = getattr(value.graph.namespace, _STANDARD_NAMES.get(name, name))
    result = function(*(_operand(value, operand) for operand in inputs))
    if out:
        check_in_place(result, out[0].dtype.name, out[0].shape)
    return result


def _operand(value: GraphValue, operand: Any) -> Any:
    """Convert an operand of NumPy to one that a Python operator can combine with a value."""
    if isinstance(operand, np.ndarray):
        return value.graph.operand(operand)
    if not isinstance(operand, np.generic):
        return operand
    number = isinstance(operand, float) or value.graph.mixes_kinds
    return operand.item() if number else value.graph.operand(np.asarray(operand))
