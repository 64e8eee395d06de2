"""The parameters of a layer, and copies of it with other numbers: as tensors of torch, or as NumPy arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, TypeAlias, cast

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._arrays.operators import is_array
from sdpa_xp_export._dtypes.dtype import to_numpy
from sdpa_xp_export._layer.held_arrays import with_changed_arrays

Change: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]
Way: TypeAlias = tuple[
    Callable[[partial[Any], Change], partial[Any]], Callable[[], AbstractContextManager[object]]
]
"""A function that returns a copy of a layer, with `change(array)` in place of the arrays that it holds, and the
context in which the copy is called."""


def parameter_arrays(layer: object) -> dict[str, Any]:
    """Return the parameters of a layer, also through a method of it or a `functools.partial`, by name."""
    if isinstance(layer, partial):
        return parameter_arrays(layer.func)
    parameters = getattr(getattr(layer, "__self__", layer), "parameters", None)
    if not isinstance(parameters, Mapping):
        return {}
    return {name: array for name, array in parameters.items() if is_array(array)}


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


def ways_to_copy(called: partial[Any]) -> Iterator[Way]:
    """Yield the ways to copy a layer, the best one first.

    A tensor of torch stays a tensor. Arrays of other libraries become NumPy arrays, which have float64 and
    nearly the same methods. A layer that needs other methods is called as it is.
    """
    kinds: set[str] = set()

    def noted(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            kinds.add("torch" if array_api_compat.is_torch_array(x) else "other")
        return x

    _changed(called, noted)
    if "torch" in kinds:
        yield _with_tensors, _tensors_take_arrays
    yield _with_numpy, nullcontext
    if kinds:
        yield lambda called, _: called, nullcontext
    if "torch" in sys.modules and "torch" not in kinds:  # a layer may make tensors when it is called
        yield _with_tensors, _tensors_take_arrays


def _tensors_take_arrays() -> AbstractContextManager[object]:
    from sdpa_xp_export._layer.tensors import tensors_take_arrays

    return tensors_take_arrays()


def _with_numpy(called: partial[Any], change: Change) -> partial[Any]:
    return _changed(called, lambda x: _numpy_array(x, change))


def _with_tensors(called: partial[Any], change: Change) -> partial[Any]:
    from sdpa_xp_export._layer.tensors import changed_tensor, is_plain_tensor

    def of_library(x: Any) -> NDArray[Any]:
        return _numpy_array(x, change)  # its layers take arrays of one library

    def of_caller(x: Any) -> Any:
        return changed_tensor(x, change) if is_plain_tensor(x) else _numpy_array(x, change)

    return _changed(called, of_caller, of_library)


def _numpy_array(x: Any, change: Change) -> NDArray[Any]:
    return change(x if isinstance(x, np.ndarray) else to_numpy("verify_layer", "weight", x))


def _changed(
    called: partial[Any], change: Callable[[Any], Any], in_library: Callable[[Any], Any] | None = None
) -> partial[Any]:
    """Return a layer with `change(array)` in place of the arrays that it holds, or else of its `parameters`."""

    def where_possible(change: Callable[[Any], Any], x: Any) -> Any:
        try:
            return change(x)
        except (TypeError, ValueError, RuntimeError):  # NumPy cannot hold it
            return x

    of_caller, of_library = (partial(where_possible, one) for one in (change, in_library or change))
    changed = with_changed_arrays(called, of_caller, of_library)
    if changed is called:
        changed = with_parameters(called, lambda _, x: of_library(x))
    return cast("partial[Any]", changed)
