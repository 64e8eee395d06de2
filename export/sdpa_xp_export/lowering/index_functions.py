"""A caller's function of the indices, which becomes nodes when it is called with values of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_xp.errors import ArgumentTypeError, message_of, summary
from sdpa_xp_export._arrays.numpy_and_torch import MissingFunctionError
from sdpa_xp_export._graph.graph import GraphValue

TRACING_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, NotImplementedError)
"""What code raises that computes with values of a graph and needs more than they have."""


def untraceable(public_function: str, what: str, error: Exception, hint: str) -> TypeError:
    """Return the error for code that `error` stopped; `what` names it, and `hint` says what it may use."""
    rule = f"{what} must be one that can be traced to ONNX"
    message = message_of(error)
    if message is not None and message.function == public_function:  # it says what values of a graph lack
        return ArgumentTypeError(public_function, f"{rule}: {message.rule}", message.got, message.hint)
    if isinstance(error, MissingFunctionError):
        return TypeError(f"{public_function}: {rule}: {error}")
    return ArgumentTypeError(public_function, rule, {"its error": summary(error)}, hint)


def call_index_function(
    name: str, function: Callable[..., Any], arguments: tuple[GraphValue, ...], dtype: str
) -> Any:
    """Return what a function makes of values: a value of `dtype`, or a bool for a condition that is constant.

    Args:
        name: The argument that the function came with, for messages.
        function: A `mask_mod` or a `score_mod`.
        arguments: The indices; for a `score_mod` the scores first.
        dtype: "bool" for a condition, else the dtype of the scores.
    """
    public_function = arguments[0].graph.function
    try:
        result = function(*arguments)
    except TRACING_ERRORS as error:
        hint = "Use operators and the functions of `index.__array_namespace__()`."
        raise untraceable(public_function, f"the function of `{name}`", error, hint) from error
    if isinstance(result, bool | np.bool_) and dtype == "bool":
        return bool(result)
    if not isinstance(result, GraphValue) or (result.elem_type == "bool") != (dtype == "bool"):
        kind = "a condition" if dtype == "bool" else "scores"
        rule = f"the function of `{name}` must return {kind}"
        got = result.elem_type if isinstance(result, GraphValue) else type(result).__name__
        raise ArgumentTypeError(public_function, rule, {"its result": got})
    return result.astype(dtype)
