"""Arithmetic of lengths and positions, for whose small integers ONNX's own operators are exact.

The functions of the array API are exact for all of int64, and need several nodes each for that.
"""

from __future__ import annotations

from sdpa_xp_export._array_api.operators import elementwise, operands
from sdpa_xp_export._graph.graph import GraphValue


def larger(one: GraphValue, other: GraphValue | int) -> GraphValue:
    """one, other -> Max(one, other)."""
    return elementwise("Max", *operands("maximum", "numeric", one, other))


def smaller(one: GraphValue, other: GraphValue | int) -> GraphValue:
    """one, other -> Min(one, other)."""
    return elementwise("Min", *operands("minimum", "numeric", one, other))


def within(value: GraphValue, least: int, most: int) -> GraphValue:
    """value -> Min(Max(value, least), most)."""
    return smaller(larger(value, least), most)


def divided(count: GraphValue, size: GraphValue) -> GraphValue:
    """count, size -> Div(count, size), if count is not negative and size is positive."""
    return elementwise("Div", *operands("floor_divide", "numeric", count, size))
