"""Operators whose result takes the place of their first operand, and those that NumPy starts.

No array is written to: `x += y` names the sum `x`, for a value and for an array of NumPy alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from sdpa_xp._checks import message
from sdpa_xp_export.spec import Shape

if TYPE_CHECKING:
    from sdpa_xp_export.array import Value

_OF_UFUNCS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "power": operator.pow,
    "matmul": operator.matmul,
    "left_shift": operator.lshift,
    "right_shift": operator.rshift,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}
"""The operators, by the names of the functions that NumPy computes them with."""


def operator_of(apply: Callable[[Any, Any], Any]) -> Callable[[Value, object], Value]:
    """Return the operator in place; its result has the dtype and the shape of the first operand."""

    def method(self: Value, other: object) -> Value:
        made: Value = apply(self, other)
        if not self.graph.mixes_kinds:
            _check(made, self.dtype, self.shape)
        return made

    return method


def of_ufunc(
    value: Value,
    ufunc: np.ufunc,
    method: str,
    inputs: tuple[Any, ...],
    out: tuple[Any, ...] = (),
    **keywords: Any,
) -> Any:
    """Compute what NumPy asks for as an operator of Python; `out` is the first operand of one in place."""
    apply = _OF_UFUNCS.get(ufunc.__name__)
    if apply is None or method != "__call__" or keywords or (out and out[0] is not inputs[0]):
        return NotImplemented
    made: Value = apply(*(_beside(value, each) for each in inputs))
    if out:
        _check(made, out[0].dtype.name, out[0].shape)
    return made


def _beside(value: Value, given: Any) -> Any:
    """Convert an operand to what Python's operators take beside a value."""
    if isinstance(given, np.ndarray):
        return value.graph.operand(given)
    if not isinstance(given, np.generic):
        return given
    number = isinstance(given, float) or value.graph.mixes_kinds
    return given.item() if number else value.graph.operand(np.asarray(given))


def _check(made: Value, dtype: str, shape: Shape) -> None:
    """Refuse a result in place that has another dtype or shape than what it takes the place of."""
    rule = "an operator in place must leave its first operand the dtype and the shape"
    hint = "Write x = x + y for x += y."
    if made.dtype != dtype:
        got = {"dtype": dtype, "dtype of the result": made.dtype}
        raise TypeError(message(made.graph.function, rule, got, hint))
    if made.shape != shape:
        lengths = {"shape": shape, "shape of the result": made.shape}
        raise ValueError(message(made.graph.function, rule, lengths, hint))
