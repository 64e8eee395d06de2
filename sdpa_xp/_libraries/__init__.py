"""The array libraries: one file for each, with the same methods, and functions that find an array's library.

To add a library, add a file with a subclass of `Library`, and lines to `libraries`. No library is imported
here. A library is recognised by the types of its arrays, after the caller has imported it: only then is its
file loaded. Dtypes are known by name, because each library has its own classes of dtypes.
"""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, TypeGuard, TypeVar, cast

import array_api_compat as compat

from .base import Library, is_compiling
from .protocols import READ_ONLY, TRACED, Access, AnyArray, Array, Dtype, Namespace, Override

T = TypeVar("T")
FLOATING = ("float16", "bfloat16", "float32", "float64")
LARGEST = {"float32": (2 - 2**-23) * 2.0**127, "float64": sys.float_info.max}
"""The largest finite number of each accumulation dtype."""
_NAME = re.compile(r"\b(?:bfloat|float|complex|uint|int)\d+\b|\bbool\b")
_STANDARD = re.compile(r"(?:bfloat|float|complex|uint|int)\d|bool")
UNKNOWN = Library()
"""Any other library that follows the standard."""
_BY_TYPE: dict[type, Library] = {}
"""The library of each type of array, so that `owns` is called once for a type.

It needs no lock, also without the GIL: a dict is safe to read and write from threads, and two threads that look
up a new type find the same library. A type is kept for ever, as its module is."""


def libraries() -> Iterator[Library]:
    """Yield the libraries that the caller has imported, in the order in which they are asked about an array."""
    # Statements: torch.compile, which may meet the first array, traces no `import_module`.
    if "numpy" in sys.modules:
        from .numpy import NUMPY

        yield NUMPY
    if "torch" in sys.modules:
        from .torch import TORCH

        yield TORCH
    if "jax" in sys.modules:
        from .jax import JAX

        yield JAX
    if "cupy" in sys.modules:
        from .cupy import CUPY

        yield CUPY
    if "mlx.core" in sys.modules:
        from .mlx import MLX

        yield MLX
    if "dask.array" in sys.modules:
        from .dask import DASK

        yield DASK
    if "array_api_strict" in sys.modules:
        from .numpy import STRICT

        yield STRICT


def library_of(array: object) -> Library:
    """Return the library that `array` belongs to."""
    known = _BY_TYPE.get(type(array))
    if known is None:
        if (over := getattr(array, "__sdpa_xp_library__", None)) is not None:  # jets: see `jets.py`
            return cast(Library, over)
        known = next((library for library in libraries() if library.owns(array)), UNKNOWN)
        if not is_compiling():  # a trace that noted it would be out of date at once
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
    # NumPy registers its numbers as numbers, but not its bool.
    return isinstance(value, numbers.Number) or (numpy is not None and isinstance(value, numpy.generic))


def numpy_array() -> Array:
    """Return a NumPy array, for calls in which no argument determines the library."""
    return cast(Array, import_module("numpy").empty(0))


JETS = "jets"
"""What the name of a namespace of jets begins with: see `jets.py`."""
HOST = "NumPy"
"""The library that computes reproducible calls for all others, for messages."""


def host_library() -> Library:
    """Return the library `HOST`."""
    from .numpy import NUMPY

    return NUMPY


def to_host(array: AnyArray) -> Array:
    """Return an array as one of the host library, in the same memory if it can read that."""
    return cast(Array, library_of(array).to_numpy(array))


def from_host(array: Array, like: AnyArray) -> Array:
    """Return an array of the host library as one of the library and the device of `like`."""
    library = library_of(like)
    return cast(Array, library.from_numpy(array, library.namespace(like), library.device(like)))


def namespace_name(array: AnyArray) -> str:
    """Return the name of the namespace of `array`, for messages."""
    return namespace_of(array).__name__.removeprefix("array_api_compat.")


def namespace_of(array: AnyArray) -> Namespace:
    """Return the array-API namespace of `array`."""
    return library_of(array).namespace(array)


def is_traced(array: object) -> bool:
    """Return whether values cannot be read now, as in a lazy graph, a jit or an export."""
    return library_of(array).is_traced(array)


def may_read(access: Access, *arrays: Array) -> bool:
    """Return whether values of a call and of `arrays` can be read now, without waiting for a device."""
    return not (access.is_traced or access.waits or any(map(is_traced, arrays)))


def truth(array: Array) -> bool | None:
    """Return the truth of an array of one element; None if it cannot be read now."""
    return None if is_traced(array) else bool(array)


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
        if library is not last:
            autograd = library.autograd
            if autograd is not None and autograd.is_transforming():
                return None
        signature = library.array_signature(array)
        if signature is None:
            return None
        signatures += (signature,)
        last = library
    return signatures


def checked(library: Library, function: str, result: T, name: str = "") -> T:
    """Return a result, unless `library` is set to refuse it for a NaN or inf, which `computing` has put off.

    The arrays of a NamedTuple are named by its fields.
    """
    if library.has_settings:
        fields: Mapping[str, Any] = cast(Any, result)._asdict() if isinstance(result, tuple) else {name: result}
        for field, array in fields.items():
            if isinstance(array, tuple):
                checked(library, function, array)
            elif array is not None:
                library.find_nonfinite(function, field, array)
    return result


def access_of(arrays: Iterable[Array]) -> Access:
    """Return what a call may do with `arrays`, all of which are on the device of the first."""
    arrays = list(arrays)
    if any(is_traced(array) for array in arrays):
        return TRACED
    library = library_of(arrays[0])
    waits = not library.uses_our_threads and library.is_accelerator(library.device(arrays[0]))
    is_writeable = library.writes_in_place and not waits
    if is_writeable and library.autograd is not None:
        is_writeable = not library.autograd.records(arrays)
    return Access(False, is_writeable, waits, library.uses_our_threads)


def joint_access(access: Access, array: Array) -> Access:
    """Return what a call of this access may do if `array`, on the same device, joins it."""
    more = access_of([array])
    if access.is_traced or more.is_traced:
        return TRACED
    return READ_ONLY if access.is_writeable and not more.is_writeable else access


def with_axes(array: Array, axes: int) -> Array:
    """Return an array that meets arrays of so many axes: with these axes, if its library refuses others."""
    if not library_of(array).refuses_unlike_axes():
        return array
    return namespace_of(array).reshape(array, (*[1] * (axes - array.ndim), *array.shape))


def rows_at(array: Array, indices: Sequence[int]) -> Array:
    """Return elements of the first axis; a view if they lie side by side."""
    if are_consecutive(indices):
        return array[indices[0] : indices[-1] + 1, ...]
    return cast(Array, library_of(array).take_rows(array, indices))


def are_consecutive(indices: Sequence[int]) -> bool:
    """Return whether each number is the one before it plus 1."""
    first, last = indices[0], indices[-1]
    return last - first == len(indices) - 1 and list(indices) == [*range(first, last + 1)]


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


def in_own_memory(array: Array, inputs: Iterable[Array]) -> Array:
    """Return an array that can be written to, and that shares no memory with inputs: itself, or a copy."""
    library = library_of(array)
    if not library.writes_in_place or library.is_traced(array):
        return array
    if library.is_writeable(array) and not any(share_memory(array, x) for x in inputs):
        return array
    return library.namespace(array).astype(array, array.dtype, copy=True)


def dtype_name(dtype: Dtype) -> str:
    """Return the dtype's name in the standard, or "bfloat16", which the standard lacks.

    Dtypes are compared by name, because `isdtype` raises on NumPy's bfloat16 and is False on Dask's. A dtype is
    an object with a name, a class (numpy.float32), or an object that prints its name: library.float32, Float32
    or <DType float32>.
    """
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    text = str(name).rpartition(".")[2]
    known = None if text.isidentifier() and text.islower() else _NAME.search(text.lower())
    return known[0] if known else text


def has_standard_name(dtype: Dtype) -> bool:
    """Return whether the dtype's name is a name of the standard, or begins with one, such as float8_e4m3fn."""
    return _STANDARD.match(dtype_name(dtype)) is not None


def accumulation_dtype(xp: Namespace, dtype: Dtype) -> Dtype:
    """Return the dtype of scores, row sums and outputs: float64 for float64 input, else float32."""
    return xp.float64 if dtype_name(dtype) == "float64" else xp.float32


def astype_if_needed(xp: Namespace, array: Array, dtype: Dtype) -> Array:
    """Return `array` in `dtype`. The library is not called if the array has that dtype."""
    return array if array.dtype == dtype else xp.astype(array, dtype, copy=False)
