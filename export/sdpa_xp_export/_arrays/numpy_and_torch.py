"""Code that was written for NumPy or torch and meets a value of a graph.

Operators that NumPy starts, with an array or a number of NumPy on the left, are computed. Any other function of
NumPy, and any method that a value lacks, is refused; a hint names the function that does the same here.
"""

from __future__ import annotations

import inspect
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
_RENAMED = {"left_shift": "bitwise_left_shift", "power": "pow", "right_shift": "bitwise_right_shift"}
"""Those among them that the array API calls otherwise."""
_PARAMETERS = {"value": "x", "one": "x", "from_": "x", "other": "y", "type": "dtype", "to": "dtype"}
"""The parameters of functions of the namespace that a hint calls otherwise."""

_TABLE = """
xp.abs(x): absolute fabs; xp.acos(x): arccos; xp.acosh(x): arccosh; xp.arange(length): arange;
xp.asarray(x): asarray; xp.asin(x): arcsin; xp.asinh(x): arcsinh; xp.atan(x): arctan; xp.atan2(x, y): arctan2;
xp.astype(x, dtype): to type float half double bfloat16 int long bool; xp.atanh(x): arctanh;
xp.bitwise_invert(x): invert bitwise_not; xp.bitwise_left_shift(x, y): left_shift;
xp.bitwise_right_shift(x, y): right_shift; xp.broadcast_arrays(x, y): broadcast_arrays;
xp.broadcast_shapes(shape, shape): broadcast_shapes; xp.broadcast_to(x, shape): expand expand_as;
xp.clip(x, min, max): clip clamp; xp.concat([x, y], axis=0): concat concatenate cat;
xp.cumulative_prod(x, axis=0): cumulative_prod cumprod; xp.cumulative_sum(x, axis=0): cumulative_sum cumsum;
xp.divide(x, y): div true_divide; xp.equal(x, y): eq; xp.expand_dims(x, axis=0): expand_dims unsqueeze;
xp.eye(length): eye; xp.greater(x, y): gt; xp.greater_equal(x, y): ge; xp.hypot(x, y): hypot;
xp.isdtype(x.dtype, 'integral'): isdtype; xp.less(x, y): lt; xp.less_equal(x, y): le;
xp.logaddexp(x, y): logaddexp; xp.matmul(x, y): dot mm bmm mv; xp.matrix_transpose(x): t adjoint;
xp.max(x): amax; xp.maximum(x, 0.0): relu; xp.mean(x): average; xp.meshgrid(x, y): meshgrid; xp.min(x): amin;
xp.moveaxis(x, source, destination): movedim rollaxis; xp.multiply(x, y): mul; xp.negative(x): neg;
xp.not_equal(x, y): ne; xp.permute_dims(x, axes): transpose permute swapaxes swapdims;
xp.pow(x, y): power float_power; xp.remainder(x, y): mod; xp.repeat(x, repeats, axis=0): repeat;
xp.reshape(x, shape): view flatten ravel unflatten; xp.result_type(x, y): result_type;
xp.roll(x, shift, axis=0): roll; xp.round(x): rint; xp.sign(x): sgn; xp.squeeze(x, axis=0): squeeze;
xp.stack([x, y], axis=0): stack; xp.subtract(x, y): sub; xp.take(x, indices, axis=0): take index_select;
xp.take_along_axis(x, indices): gather; xp.trunc(x): fix; xp.unique_values(x): unique;
xp.unstack(x, axis=0): unstack unbind; xp.vecdot(x, y): inner; xp.where(condition, x, y): masked_fill;
x: copy clone contiguous detach; x.ndim: dim; x.size: numel; x / (1.0 + xp.exp(-x)): silu swish;
1.0 / xp.sqrt(x): rsqrt; 1.0 / (1.0 + xp.exp(-x)): sigmoid;
0.5 * x * (1.0 + xp.erf(x / 1.4142135623730951)): gelu;
(e := xp.exp(x - xp.max(x, axis=-1, keepdims=True))) / xp.sum(e, axis=-1, keepdims=True): softmax
"""
_ENTRIES = (entry.rpartition(":") for entry in _TABLE.split(";"))
EXPRESSIONS = {name: expression.strip() for expression, _, names in _ENTRIES for name in names.split()}
"""What to write for names of NumPy and torch, and for functions of the namespace whose signature says less.

No measure of likeness would do: to difflib, `sinc` is nearer to `sin` than `arccos` to `acos`.
"""


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
    function = getattr(value.graph.namespace, _RENAMED.get(name, name))
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
    if not value.graph.is_part:  # a function of the indices may change what a name stands for
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
    if name in EXPRESSIONS:
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
    expression = EXPRESSIONS.get(name, "")
    if not expression and name in namespace.__all__:
        expression = f"xp.{name}"
        if callable(function := getattr(namespace, name)):
            parameters = inspect.signature(function).parameters.values()
            required = (
                one for one in parameters if one.default is one.empty and one.kind != one.VAR_POSITIONAL
            )
            expression += f"({', '.join(_PARAMETERS.get(one.name, one.name) for one in required)})"
    if not expression:
        return f"The namespace of a value has no `{name}` and no replacement for it."
    if expression.startswith("xp."):
        return f"Take functions from the namespace, as xp = x.__array_namespace__(), {expression}."
    return f"Write {expression}" + (", with xp = x.__array_namespace__()." if "xp." in expression else ".")
