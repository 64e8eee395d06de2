"""The array libraries, a file each with the same functions, and which of them an array belongs to.

To add a library, add a file with a subclass of `Library`, and a line to `LIBRARIES`. No library is imported
here: one is recognised by the types of its arrays, once the caller has imported it.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeGuard, TypeVar, cast

import array_api_compat as compat

from sdpa_xp._libraries.base import ExecutionKind, Library
from sdpa_xp._libraries.cupy import CuPy
from sdpa_xp._libraries.dask import Dask
from sdpa_xp._libraries.dtypes import FLOATING, LARGEST, accumulation_dtype, astype_if_needed, dtype_name
from sdpa_xp._libraries.jax import Jax
from sdpa_xp._libraries.mlx import Mlx
from sdpa_xp._libraries.numpy import NumPy
from sdpa_xp._libraries.overrides import leading, override
from sdpa_xp._libraries.protocols import AnyArray, Array, Device, Dtype, Namespace, Shape
from sdpa_xp._libraries.strict import Strict
from sdpa_xp._libraries.torch import Torch, has_tangents, is_compiling

A = TypeVar("A")
LIBRARIES: tuple[Library, ...] = (
    NumPy(),
    Torch(),
    Jax(),
    CuPy(),
    Mlx(),
    Dask(),
    Strict(),
)
UNKNOWN = Library()
"""A library that follows the standard, and that no file here is about."""
_BY_TYPE: dict[type, Library] = {}


def library_of(array: object) -> Library:
    """Return the library that `array` belongs to."""
    found = _BY_TYPE.get(type(array))
    if found is None:
        found = next((library for library in LIBRARIES if library.owns(array)), UNKNOWN)
        _BY_TYPE[type(array)] = found
    return found


def is_array(value: object) -> TypeGuard[Array]:
    """Return whether `value` is an array of a library that follows the standard; a NumPy scalar is a number."""
    return not is_number(value) and bool(compat.is_array_api_obj(value))


def is_number(value: object) -> bool:
    """Return whether `value` is a number of Python or of NumPy."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, numbers.Number) or (numpy is not None and isinstance(value, numpy.generic))


def numpy_array() -> Array:
    """Return an array of NumPy, where nothing else says which library is meant."""
    import array_api_compat.numpy as compat_numpy

    return cast(Array, compat_numpy.empty(0))


def full_name(array: object) -> str:
    """Return the type of an array, with its module."""
    return f"{type(array).__module__}.{type(array).__qualname__}"


def namespace_of(array: AnyArray) -> Namespace:
    """Return the array-API namespace of `array`."""
    return library_of(array).namespace(array)


def device_of(array: AnyArray) -> Device:
    """Return the device of `array`, or None if its library names no single one."""
    return library_of(array).device(array)


def is_traced(array: object) -> bool:
    """Return whether values cannot be read now: a lazy graph, or an array inside a jit or an export."""
    return library_of(array).is_traced(array)


def plain(array: A) -> A:
    """Return `array` in the class that its library's functions return; an instance of a subclass as a view."""
    return library_of(array).plain(array)


def quiet(array: Array) -> AbstractContextManager[object]:
    """Return a context without NumPy's floating-point warnings, and without torch's autocast."""
    return library_of(array).quiet(array)()


def exp_in_place(xp: Namespace, array: Array) -> Array:
    """Return exp of an array that can be written to, in its memory: `out` is not in the standard."""
    computed: Array = xp.exp(array, out=array)  # type: ignore[call-arg]
    return computed


def array_signature(array: object) -> object:
    """Return what tells arrays apart except their numbers, or None if a number may matter to a check."""
    library = _BY_TYPE.get(type(array)) or library_of(array)  # each call asks this of each of its arrays
    return library.array_signature(array)


def execution_kind(arrays: Iterable[Array]) -> ExecutionKind:
    """Return how arrays, all of one library, are computed with."""
    arrays = list(arrays)
    if any(is_traced(array) for array in arrays):
        return "traced"
    return library_of(arrays[0]).execution_kind(arrays)


def widest_dtype(array: Array) -> Dtype:
    """Return float64 if the device of `array` has it, else float32."""
    library = library_of(array)
    xp = library.namespace(array)
    return xp.float64 if "float64" in library.real_dtypes(xp, library.device(array)) else xp.float32


def as_signed(array: Array) -> Array:
    """Return an integer array in a signed dtype: libraries compute little with unsigned ones.

    Numbers of 64 bits that do not fit wrap around: they are told apart from each other, and are below 0.
    """
    if not dtype_name(array.dtype).startswith("uint"):
        return array
    library = library_of(array)
    xp = cast(Any, library.namespace(array))
    wide = library.has_int64(xp, library.device(array))
    return cast(Array, xp.astype(array, xp.int64 if wide else xp.int32))


def share_memory(one: Any, other: Any) -> bool:
    """Return whether some element of one array is also an element of the other."""
    if one is other:
        return True
    views = [library_of(array).addresses(array) for array in (one, other)]
    if any(view is None for view in views):
        return False  # views of such a library are copies to the caller
    return bool(sys.modules["numpy"].shares_memory(*views))


__all__ = [
    "FLOATING",
    "LARGEST",
    "LIBRARIES",
    "AnyArray",
    "Array",
    "Device",
    "Dtype",
    "ExecutionKind",
    "Library",
    "Namespace",
    "Shape",
    "accumulation_dtype",
    "array_signature",
    "as_signed",
    "astype_if_needed",
    "device_of",
    "dtype_name",
    "execution_kind",
    "exp_in_place",
    "full_name",
    "has_tangents",
    "is_array",
    "is_compiling",
    "is_number",
    "is_traced",
    "leading",
    "library_of",
    "namespace_of",
    "numpy_array",
    "override",
    "plain",
    "quiet",
    "share_memory",
    "widest_dtype",
]
