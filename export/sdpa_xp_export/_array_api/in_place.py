"""Operators in place. No array is changed: `x += y` assigns the sum to the name `x`."""

from __future__ import annotations

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError
from sdpa_xp_export._graph.graph import GraphValue
from sdpa_xp_export.spec import SymbolicShape


def in_place_result(value: GraphValue, result: GraphValue) -> GraphValue:
    """Return the result of an operator in place, which has the dtype and the shape of its first operand."""
    if not value.graph.mixes_kinds:
        check_in_place(result, value.elem_type, value.dims)
    return result


def check_in_place(result: GraphValue, dtype: str, shape: SymbolicShape) -> None:
    """Refuse an in-place result whose dtype or shape differs from the operand that it replaces."""
    rule = "an in-place operator must not change the dtype or the shape of its first operand"
    hint = "Write x = x + y for x += y."
    if result.elem_type != dtype:
        got = {"dtype": dtype, "dtype of the result": result.elem_type}
        raise ArgumentTypeError(result.graph.function, rule, got, hint)
    if result.dims != shape:
        shapes = {"shape": shape, "shape of the result": result.dims}
        raise ArgumentValueError(result.graph.function, rule, shapes, hint)
