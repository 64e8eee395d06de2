"""The array libraries: one file for each, with the same methods, and functions that find an array's library.

To add a library, add a file with a subclass of `Library`, and a line to `LIBRARIES`. No library is imported
here. A library is recognised by the types of its arrays, after the caller has imported it.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, TypeGuard, cast

import array_api_compat as compat

from sdpa_xp._libraries.base import Library
from sdpa_xp._libraries.capabilities import TRACED, Access
from sdpa_xp._libraries.cubed import Cubed
from sdpa_xp._libraries.cupy import CuPy
from sdpa_xp._libraries.dask import Dask
from sdpa_xp._libraries.jax import Jax
from sdpa_xp._libraries.mlx import Mlx
from sdpa_xp._libraries.numpy import NumPy, Strict
from sdpa_xp._libraries.protocols import AnyArray, Array, Dtype, Namespace, Override
from sdpa_xp._libraries.torch import Torch

LIBRARIES: tuple[Library, ...] = (
    NumPy(),
    Torch(),
    Jax(),
    CuPy(),
    Mlx(),
    Dask(),
    Cubed(),
    Strict(),
)
UNKNOWN = Library()
"""Any other library that follows the standard."""
_BY_TYPE: dict[type, Library] = {}
"""The library of each type of array, so that `owns` is called once for a type.

It needs no lock, also without the GIL: a dict is safe to read and write from threads, and two threads that look
up a new type find the same library. A type is kept for ever, as its module is."""


def library_of(array: object) -> Library:
    """Return the library that `array` belongs to."""
    known = _BY_TYPE.get(type(array))
    if known is None:
        known = next((library for library in LIBRARIES if library.owns(array)), UNKNOWN)
        _BY_TYPE[type(array)] = known
    return known


def is_unknown(array: object) -> bool:
    """Return whether the library of `array` has no file here."""
    return library_of(array) is UNKNOWN


def has_override(*inputs: object) -> bool:
    """Return whether the type of some input overrides public functions."""
    return any(hasattr(type(array), "__sdpa_xp__") for array in inputs)


def overridden(function: str, inputs: Mapping[str, Any], options: Callable[[], Mapping[str, object]]) -> Any:
    """Return the result of the inputs' own function, or NotImplemented if there is none.

    Each type is asked once: a subclass before its bases, then in the order of the inputs, as NumPy does for
    `__array_function__` (NEP 18).
    """
    overriding: list[Any] = []
    for array in inputs.values():
        kind = type(array)
        if hasattr(kind, "__sdpa_xp__") and all(kind is not type(other) for other in overriding):
            bases = (n for n, other in enumerate(overriding) if issubclass(kind, type(other)))
            overriding.insert(next(bases, len(overriding)), array)
    for array in overriding:
        method: Override = array.__sdpa_xp__
        result = method(function, inputs, options())
        if result is not NotImplemented:
            return result
    return NotImplemented


def is_array(value: object) -> TypeGuard[Array]:
    """Return whether `value` is an array that follows the standard; NumPy scalars count as numbers."""
    return not is_number(value) and bool(compat.is_array_api_obj(value))


def is_number(value: object) -> bool:
    """Return whether `value` is a number of Python or of NumPy."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, numbers.Number) or (numpy is not None and isinstance(value, numpy.generic))


def numpy_array() -> Array:
    """Return a NumPy array, for calls in which no argument determines the library."""
    return cast(Array, import_module("numpy").empty(0))


def namespace_of(array: AnyArray) -> Namespace:
    """Return the array-API namespace of `array`."""
    return library_of(array).namespace(array)


def is_traced(array: object) -> bool:
    """Return whether values cannot be read now, as in a lazy graph, a jit or an export."""
    return library_of(array).is_traced(array)


def computing(array: object) -> AbstractContextManager[object]:
    """Return a context without NumPy's warnings, torch's autocast and JAX's debugging, on CuPy's device."""
    return library_of(array).context_maker(cast(Array, array))()


def array_signatures(arrays: Iterable[object]) -> tuple[object, ...] | None:
    """Return a key of all that checks read of `arrays` except numbers, or None if a check may read numbers."""
    signatures: tuple[object, ...] = ()
    last = None
    # Each call comes here: types are looked up in place, and a library is asked once for arrays in a row.
    for array in arrays:
        library = _BY_TYPE.get(type(array)) or library_of(array)
        if library is not last and library.is_transforming():
            return None
        signature = library.array_signature(array)
        if signature is None:
            return None
        signatures += (signature,)
        last = library
    return signatures


def access_of(arrays: Iterable[Array]) -> Access:
    """Return what a call may do with `arrays`, all of which are on the device of the first."""
    arrays = list(arrays)
    if any(is_traced(array) for array in arrays):
        return TRACED
    library = library_of(arrays[0])
    waits = library.is_accelerator(library.device(arrays[0]))
    return Access(False, library.results_are_writeable(arrays), waits, library.uses_our_threads)


def widest_dtype(function: str, array: Array) -> Dtype:
    """Return float64 if the device of `array` has it, else float32. `function` is for messages."""
    library = library_of(array)
    xp = library.namespace(array)
    has_float64 = library.has_dtype(function, xp, library.device(array), "float64")
    return xp.float64 if has_float64 else xp.float32


def share_memory(first: Any, second: Any) -> bool:
    """Return whether some element of one array is also an element of the other array."""
    if first is second:
        return True
    views = [library_of(array).addresses(array) for array in (first, second)]
    if any(view is None for view in views):
        return False  # the library's slices behave like copies, so that two arrays never share an element
    return bool(sys.modules["numpy"].shares_memory(*views))
