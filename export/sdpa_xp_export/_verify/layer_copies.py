"""Copy a layer with other numbers in its arrays: as tensors of torch, as NumPy arrays, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias, cast

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from sdpa_xp_export._dtypes.dtype import to_numpy
from sdpa_xp_export._layer import with_parameters
from sdpa_xp_export._verify.held_arrays import with_changed_arrays

Change: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]
Way: TypeAlias = tuple[
    Callable[[partial[Any], Change], partial[Any]], Callable[[], AbstractContextManager[object]]
]
"""A function that returns a copy of a layer, with `change(array)` in place of the arrays that it holds, and the
context in which the copy is called."""


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
    from sdpa_xp_export._verify.tensor_copies import tensors_take_arrays

    return tensors_take_arrays()


def _with_numpy(called: partial[Any], change: Change) -> partial[Any]:
    return _changed(called, lambda x: _numpy_array(x, change))


def _with_tensors(called: partial[Any], change: Change) -> partial[Any]:
    from sdpa_xp_export._verify.tensor_copies import changed_tensor, is_plain_tensor

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
