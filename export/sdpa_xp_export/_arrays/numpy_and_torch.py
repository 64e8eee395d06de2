"""Code that was written for NumPy or torch and meets a value of a graph.

Operators that NumPy starts, with an array or a number of NumPy on the left, are computed. Any other function of
NumPy, and any method that a value lacks, is refused; a hint names the function that does the same here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message

from .._graph.graph import BRANCH_HINT, GraphValue
from ..spec import SymbolicShape

_OPERATORS = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "power", "matmul"),
    *("left_shift", "right_shift", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
)
"""The functions of NumPy that compute operators."""
ARGUMENTS = {
    **dict.fromkeys(("broadcast_arrays", "hypot", "logaddexp", "meshgrid", "result_type"), "x, y"),
    **dict.fromkeys(("concat", "stack"), "[x, y], axis=0"),
    **dict.fromkeys(("cumulative_prod", "cumulative_sum", "expand_dims", "squeeze", "unstack"), "x, axis=0"),
    **dict.fromkeys(("arange", "eye"), "length"),
    "asarray": "x",
    "broadcast_shapes": "shape, shape",
    "clip": "x, min, max",
    "isdtype": "x.dtype, 'integral'",
    "repeat": "x, repeats, axis=0",
    "roll": "x, shift, axis=0",
    "take": "x, indices, axis=0",
}
"""What a function of the namespace takes, if it is not what its signature requires."""
_PARAMETERS = {"value": "x", "one": "x", "from_": "x", "other": "y", "type": "dtype", "to": "dtype"}
"""The parameters that a hint calls otherwise."""

_NAMES = """
abs absolute fabs; acos arccos; acosh arccosh; asin arcsin; asinh arcsinh;
astype to type float half double bfloat16 int long bool; atan arctan; atan2 arctan2; atanh arctanh;
bitwise_invert invert bitwise_not; bitwise_left_shift left_shift; bitwise_right_shift right_shift;
broadcast_to expand expand_as; clip clamp; concat concatenate cat; cumulative_prod cumprod;
cumulative_sum cumsum; divide div true_divide; equal eq; expand_dims unsqueeze; greater gt;
greater_equal ge; less lt; less_equal le; matmul dot mm bmm mv; matrix_transpose t adjoint; max amax;
mean average; min amin; moveaxis movedim rollaxis; multiply mul; negative neg; not_equal ne;
permute_dims transpose permute swapaxes swapdims; pow power float_power; remainder mod;
reshape view flatten ravel unflatten; round rint; sign sgn; subtract sub; take index_select;
take_along_axis gather; trunc fix; unique_values unique; unstack unbind; vecdot inner; where masked_fill
"""
_GROUPS = (group.split() for group in _NAMES.split(";"))
OTHER_NAMES = {other: name for name, *others in _GROUPS for other in others}
"""The function of the namespace that does what these functions and methods of NumPy and torch do."""

EXPRESSIONS = {
    **dict.fromkeys(("silu", "swish"), "x / (1.0 + xp.exp(-x))"),
    **dict.fromkeys(("copy", "clone", "contiguous", "detach"), "x"),
    "dim": "x.ndim",
    "gelu": "0.5 * x * (1.0 + xp.erf(x / 1.4142135623730951))",
    "numel": "x.size",
    "relu": "xp.maximum(x, 0.0)",
    "rsqrt": "1.0 / xp.sqrt(x)",
    "sigmoid": "1.0 / (1.0 + xp.exp(-x))",
    "softmax": ("(e := xp.exp(x - xp.max(x, axis=-1, keepdims=True))) / xp.sum(e, axis=-1, keepdims=True)"),
}
"""What to write instead of other functions and methods."""


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
    # `x += value` passes x as `out`, too; any other `out` would be an array to write to.
    if name not in _OPERATORS or method != "__call__" or keywords or (out and out[0] is not inputs[0]):
        raise numpy_error(value, name)
    function = getattr(value.graph.namespace, OTHER_NAMES.get(name, name))
    graph = value.graph
    result = function(*(graph.operand(x) if isinstance(x, np.ndarray) else x for x in inputs))
    if out:
        check_in_place(result, out[0].dtype.name, out[0].shape)
    return result


def numpy_error(value: GraphValue, name: str) -> ArgumentTypeError:
    """Return the error for a function of NumPy, which would make an array of objects of a value."""
    rule, hint = f"a value of a graph must not go to `numpy.{name}`", function_hint(name, value.graph.namespace)
    return ArgumentTypeError(value.graph.function, rule, {"value": value.name}, hint)


def attribute_error(value: GraphValue, name: str) -> AttributeError:
    """Return the error for an attribute of other arrays: where it is found here."""
    rule = f"a value of a graph has no attribute {name!r}"
    # Python and libraries ask for private attributes to find out what an object is, which no user wrote.
    hint = "" if name.startswith("_") else function_hint(name, value.graph.namespace)
    hint += f" {BRANCH_HINT}" if name in ("any", "all") else ""  # whose callers want an `if`, the next error
    return AttributeError(Message(value.graph.function, rule, {"value": value.name}, hint))


def in_place_result(value: GraphValue, result: GraphValue) -> GraphValue:
    """Return the result of an operator in place, which has the dtype and the shape of its first operand."""
    if not value.graph.mixes_kinds:  # a function of the indices may change what a name stands for
        check_in_place(result, value.elem_type, value.dims)
    return result


def check_in_place(result: GraphValue, dtype: str, shape: SymbolicShape) -> None:
    """Refuse an in-place result whose dtype or shape differs from the operand that it replaces."""
    rule = "an in-place operator must not change the dtype or the shape of its first operand"
    hint = "Write x = x + y for x += y."
    if result.elem_type != dtype:
        got = {"dtype": dtype, "dtype of the result": result.elem_type}
        raise ArgumentTypeError(result.graph.function, rule, got, hint)
    if result.graph.loose(result.dims) != result.graph.loose(shape):
        shapes = {"shape": shape, "shape of the result": result.dims}
        raise ArgumentValueError(result.graph.function, rule, shapes, hint)


_OF_COMPLEX = ("complex64", "complex128", "fft", "imag")
"""Parts of the array API that are about complex numbers."""


class MissingFunctionError(AttributeError):
    """The namespace of a value lacks a function."""


def missing_function(name: str, namespace: ModuleType) -> MissingFunctionError:
    """Return the error for a function that the namespace of a value lacks: what it has instead."""
    if name in EXPRESSIONS or OTHER_NAMES.get(name) in namespace.__all__:
        hint = function_hint(name, namespace)
        return MissingFunctionError(f"a value of a graph has no function `{name}`. {hint}")
    if name in _OF_COMPLEX:
        return MissingFunctionError(
            f"a value of a graph has no `{name}`, since no graph holds complex numbers."
        )
    rule = f"a value of a graph has no function `{name}`, and the array API has none"
    return MissingFunctionError(f"{rule} that does the same; `xp.__all__` lists the functions.")


def function_hint(name: str, namespace: ModuleType) -> str:
    """Return what to write instead of a function or a method of that name; it exists in the namespace."""
    standard = OTHER_NAMES.get(name, name)
    if name in EXPRESSIONS:
        expression = EXPRESSIONS[name]
        return f"Write {expression}" + (", with xp = x.__array_namespace__()." if "xp." in expression else ".")
    if standard not in namespace.__all__:
        return f"The namespace of a value has no `{name}` and no replacement for it."
    call = f"xp.{standard}"
    if callable(function := getattr(namespace, standard)):
        call += f"({ARGUMENTS.get(standard) or _required(function)})"
    return f"Take functions from the namespace, as xp = x.__array_namespace__(), {call}."


def _required(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    required = (one.name for one in parameters if one.default is one.empty and one.kind != one.VAR_POSITIONAL)
    return ", ".join(_PARAMETERS.get(name, name) for name in required)
