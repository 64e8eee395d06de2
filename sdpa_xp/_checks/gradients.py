"""Checks of gradients: the cotangent, and functions that can be differentiated."""

from __future__ import annotations

from typing import NoReturn

from sdpa_xp._checks.arrays import check_one_device, check_one_dtype, check_one_library
from sdpa_xp._checks.shapes import check_known
from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp.errors import ArgumentValueError


def check_cotangent(function: str, value: object, query: Array, output: Shape) -> Array:
    """Check that a cotangent is like the output, and return it.

    The output has the library, dtype and device of the query.
    """
    _, arrays = check_one_library(function, {"query": query, "cotangent": value})
    check_one_dtype(function, arrays)
    check_one_device(function, arrays)
    array = arrays["cotangent"]
    check_known(function, "cotangent", array.shape)
    if array.shape != output:
        rule = "`cotangent` must have the shape of the output"
        raise ArgumentValueError(function, rule, {"cotangent.shape": array.shape, "output.shape": output})
    return array


def refuse_unknown_derivative(function: str, *, traced: bool) -> NoReturn:
    """Refuse a caller's function that does more than add to the score, or that cannot be tried."""
    rule = "the function of `bias` must only add to the score, because its derivative is not known"
    got = "a function that does more"
    if traced:
        got = "a function inside a jit or a lazy graph, where it cannot be tried"
    hint = "Pass what it adds as an array, or let torch or JAX differentiate `scaled_dot_product_attention`."
    raise ArgumentValueError(function, rule, {"bias": got}, hint)
