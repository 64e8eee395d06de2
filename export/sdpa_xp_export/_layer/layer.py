"""A layer as the exporter uses it: arguments, parameters and outputs by name, and its errors.

The outputs of a graph are the arrays that the layer returned, in a structure that `jit` makes again.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, TypeAlias, cast

from sdpa_xp import AttentionStatistics
from sdpa_xp._checks.keywords import hint_for_keyword
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message, message_of, summary
from sdpa_xp.masks import Mask

from .._arrays.dispatch import is_array_elsewhere
from .._call.operands import as_statistics, by_name, with_operands
from .._graph import FloatOfLengths, GraphValue, Length, length_error
from .._packages import LIBRARIES, package_of
from ..spec import TensorSpec

Parts: TypeAlias = tuple[Mapping[Any, Any], Callable[[Iterable[Any]], Any]]
"""The parts of a structure by name, and what makes a structure of other parts."""
Put: TypeAlias = Callable[[Any, Any, Any], None]
Maker: TypeAlias = Callable[[Iterator[Any]], Any]
_OF_A_LENGTH = re.compile(r"\bLength\b|expected a sequence of integers")
"""Errors of torch and NumPy for a length that only a run knows."""


def bound_arguments(
    function: str, layer: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any], hint: str
) -> inspect.BoundArguments:
    """Return the arguments of a layer by name; `hint` says what to pass if they do not fit."""
    try:
        signature = signature_of(layer)
    except ValueError as error:  # a function in C may have none
        rule, how = "`layer` must be a function with a signature", "Write it in Python, as in lambda x: ..."
        raise ArgumentTypeError(function, rule, {"layer": getattr(layer, "__name__", layer)}, how) from error
    try:
        return signature.bind(*inputs, **keywords)
    except TypeError as error:
        rule, got = "the arguments must fit `layer`", {"its error": error, "its signature": signature}
        if type(layer).__name__ == "MultiheadAttention":  # torch's, whose signature takes three lines
            got, hint = {"its error": error}, _torch_hint(layer)
        elif unknown := [name for name in keywords if name not in signature.parameters]:
            names = [*signature.parameters, *["opset"] * (function == "to_onnx")]
            hint = hint_for_keyword(unknown[0], names) or hint
        raise ArgumentTypeError(function, rule, got, hint) from error


def signature_of(layer: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a layer; a torch module, which takes any arguments, passes them to `forward`."""
    of_torch = _is_torch_module(layer) and not isinstance(layer, MethodType)
    return inspect.signature(cast(Any, layer).forward if of_torch else layer)


@contextmanager
def foreign_errors_reworded(function: str, layer: object, *, open_lengths: bool) -> Iterator[None]:
    """Raise the error of another library, which was called with a value or a length of a graph, with a way out.

    NumPy takes a length for text, so its errors do not name it. A torch module that is written in array-API
    code can be traced, so the type of a layer does not show whether it works.
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        # A tensor's `x.size()` calls a length, which is an attribute of arrays.
        if open_lengths and _OF_A_LENGTH.search(str(error)) and "not callable" not in str(error):
            raise length_error(function, {"its error": summary(error)}) from error
        if "'GraphValue' object does not support item" in str(error):
            # A value has no method for it: libraries would take it for an array that they may write to.
            rule = "a value of a graph cannot be written to"
            hint = "Write x = xp.where(condition, new, x), or join the old parts and the new ones by xp.concat."
            raise ArgumentTypeError(function, rule, {"its error": summary(error)}, hint) from error
        of_torch = _is_torch_module(layer)
        message = message_of(error)
        is_own = message is not None
        # A torch module that asks a value for a method of a tensor gets the hint for torch modules.
        asks_as_tensor = is_own and of_torch and isinstance(error, AttributeError)
        if not asks_as_tensor and (is_own or not (of_torch or "GraphValue" in str(error))):
            raise
        rule = "`layer` must be array-API code, which takes its functions from `x.__array_namespace__()`"
        hint = (
            _torch_hint(layer)
            if of_torch
            else "Write xp = x.__array_namespace__() and xp.tanh(x) in place of another library's tanh(x)."
        )
        why = message.rule if message else summary(error)  # the function and the value stand in this message
        got = {"layer": type(layer).__name__, "its error": why}
        raise ArgumentTypeError(function, rule, got, hint) from error


def located_error(function: str, error: Exception) -> Exception:
    """Return the error of a layer that cannot be traced, with the place in the code of the caller."""
    message = message_of(error)
    if message is None:  # an error of the layer itself, whose traceback says where
        return error
    got = dict(message.got)
    frames = [
        (frame, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARIES
    ]
    if frames:
        frame, number = frames[-1]
        line = linecache.getline(frame.f_code.co_filename, number).strip()
        got["where"] = f"{Path(frame.f_code.co_filename).name}:{number}" + (f", `{line}`" if line else "")
    kind = type(error) if isinstance(error, ArgumentTypeError | ArgumentValueError) else None
    parts = (function, message.rule, got, message.hint)
    return kind(*parts) if kind else type(error)(Message(*parts))


def _torch_hint(layer: object) -> str:
    how = ": MultiHeadAttention.from_torch(layer)" * (type(layer).__name__ == "MultiheadAttention")
    return (
        f"Export a torch module with `torch.onnx.export`, or load its weights into one of sdpa_xp.layers{how}."
    )


def _is_torch_module(layer: object) -> bool:
    owner = type(getattr(layer, "__self__", layer))  # of a method
    base = "torch.nn.modules.module", "Module"
    return any((parent.__module__, parent.__name__) == base for parent in owner.__mro__)


def with_arrays(argument: Any, name: str, array_of: Callable[[str, TensorSpec], Any]) -> Any:
    """Return an argument of a layer with `array_of(name, spec)` instead of each spec that it is or holds.

    Masks and biases, tuples, lists and dictionaries hold specs. `name` is the name of the argument.
    """
    if isinstance(argument, TensorSpec):
        return array_of(name, argument)
    if isinstance(argument, Mask | Bias):
        return with_operands(
            argument, lambda field, x: with_arrays(x, getattr(argument, "argument", field), array_of)
        )
    if type(argument) in (tuple, list):  # a tuple may be the layer's *arguments
        return type(argument)(with_arrays(element, name, array_of) for element in argument)
    if isinstance(argument, dict):
        return {key: with_arrays(element, key, array_of) for key, element in argument.items()}
    return argument


def parameter_arrays(layer: object) -> dict[str, Any]:
    """Return the parameters of a layer, also through a method of it or a `functools.partial`, by name."""
    if isinstance(layer, partial):
        return parameter_arrays(layer.func)
    parameters = getattr(getattr(layer, "__self__", layer), "parameters", None)
    if not isinstance(parameters, Mapping):
        return {}
    return {name: array for name, array in parameters.items() if is_array_elsewhere(array)}


def with_parameters(layer: Callable[..., Any], change: Callable[[str, Any], Any]) -> Callable[..., Any]:
    """Return `layer` with `change(name, array)` instead of each parameter.

    This works for a layer that has `parameters` and `with_parameters`, like those of `sdpa_xp.layers`, and its
    methods. Any other function is returned unchanged.
    """
    if isinstance(layer, partial):
        return partial(with_parameters(layer.func, change), *layer.args, **layer.keywords)
    if isinstance(layer, MethodType):
        changed_self = with_parameters(cast(Callable[..., Any], layer.__self__), change)
        method: Callable[..., Any] = MethodType(layer.__func__, changed_self)
        return method
    arrays = parameter_arrays(layer)
    replace = getattr(layer, "with_parameters", None) if arrays else None
    if replace is None:
        return layer
    return cast(Callable[..., Any], replace({name: change(name, array) for name, array in arrays.items()}))


def named_outputs(result: Any) -> dict[Any, Any]:
    """Return `outputs_of` a layer's result as a dictionary."""
    return dict(outputs_of(result))


def outputs_of(result: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the arrays and numbers that a layer returned, with their names; None and text are no outputs.

    A mapping, a NamedTuple and a dataclass have names; else they are `output`, or `output_0` and on. Names of
    structures within others are joined by `_`. Statistics have the names of those that were asked for; top keys
    are `top_weights` and `top_indices`.
    """
    return _outputs("output", result, is_named=False)


def _outputs(name: Any, result: Any, *, is_named: bool) -> Iterator[tuple[Any, Any]]:
    structure = _structure(result)
    if structure is None:
        if result is not None and not isinstance(result, str | bytes):
            yield name, result
        return
    is_sequence = isinstance(result, tuple | list) and not hasattr(result, "_fields")
    for key, part in structure[0].items():
        yield from _outputs(f"{name}_{key}" if is_named or is_sequence else key, part, is_named=True)


def as_returned(result: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that returns arrays as the layer returned `result`; what is no array stays as it is."""
    make = _maker(result)
    return lambda arrays: make(iter(arrays))


def is_output(part: object) -> bool:
    """Return whether a part of a result is computed by the graph."""
    return isinstance(part, GraphValue | Length | FloatOfLengths) or is_array_elsewhere(part)


def _maker(result: Any) -> Maker:
    structure = _structure(result)
    if structure is not None:
        makers, make = [_maker(part) for part in structure[0].values()], structure[1]
        return lambda arrays: make([maker(arrays) for maker in makers])
    if isinstance(result, Length | FloatOfLengths):
        number = int if isinstance(result, Length) else float
        return lambda arrays: number(next(arrays))
    return next if is_output(result) else lambda _: result


def _structure(result: Any) -> Parts | None:
    """Return the parts of a structure; None for an array and for what else has no parts."""
    kind: Any = type(result)
    if isinstance(result, AttentionStatistics):
        named = by_name(result)
        return named, lambda parts: as_statistics(dict(zip(named, parts, strict=True)))
    if isinstance(result, Mapping):
        keys = [*result]
        if isinstance(result, dict) and kind is not dict:  # another kind of dictionary, with what it has beside
            return result, partial(_refilled, _emptied(result, keys, dict.__setitem__), keys, dict.__setitem__)
        return result, lambda parts: dict(zip(keys, parts, strict=True))
    if kind in (tuple, list) or hasattr(result, "_make"):
        names = getattr(result, "_fields", range(len(result)))
        return dict(zip(names, result, strict=True)), getattr(kind, "_make", kind)
    if dataclasses.is_dataclass(result) and package_of(kind) not in ("sdpa_xp", "sdpa_xp_export"):
        names = [field.name for field in dataclasses.fields(result)]
        named = {name: getattr(result, name) for name in names}
        return named, partial(_refilled, _emptied(result, names, object.__setattr__), names, object.__setattr__)
    return None


def _emptied(result: Any, names: Sequence[Any], put: Put) -> Any:
    """Return a copy of a structure without its parts: values of a graph would keep the graph."""
    return _refilled(result, names, put, [None] * len(names))


def _refilled(structure: Any, names: Sequence[Any], put: Put, parts: Iterable[Any]) -> Any:
    """Return a copy of a structure with other parts, which is made without a call of its class."""
    copied = copy.copy(structure)
    for name, part in zip(names, parts, strict=True):
        put(copied, name, part)
    return copied
