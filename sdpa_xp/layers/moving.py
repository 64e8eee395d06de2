"""An array in another library: by DLPack, and around what DLPack does not carry.

Dask has none; JAX takes no read-only array of NumPy by it, and CuPy none of the CPU; NumPy and
array-api-strict have no bfloat16, and NumPy gives none.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import Library, device_of, dtype_name, is_array, library_of, namespace_of, numpy_array
from sdpa_xp._libraries.protocols import Array, Device


class Place(NamedTuple):
    """Where arrays go."""

    xp: Any
    library: Library
    device: Device
    """None is the library's default."""


def place(function: str, like: Any, device: Device = None) -> Place:
    """The library that `like` is, or is an array of; then its device, if no other is named."""
    module = not is_array(like)
    if module:
        checks.module_of_arrays(function, like)
    array: Array = like.zeros((0,)) if module else like
    if device is None and not module:
        device = device_of(array)
    return Place(namespace_of(array), library_of(array), device)


def moved(array: Array, to: Place) -> Array:
    """A copy of `array`, in its own dtype where the library has that, else in float32."""
    half = dtype_name(array.dtype) == "bfloat16"
    on_device = to.library.exchanges_memory and library_of(array).exchanges_memory
    if half and not on_device:
        own = namespace_of(array)
        array = own.astype(array, own.float32)
    copy = _by_dlpack(array, to) if on_device else _by_host(array, to)
    dtype = to.xp.bfloat16 if half and hasattr(to.xp, "bfloat16") else copy.dtype
    copy = cast(Array, to.xp.astype(copy, dtype, copy=True))
    there = to.device is None or device_of(copy) == to.device
    return copy if there else library_of(copy).on_device(copy, to.device)


def _by_dlpack(array: Any, to: Place) -> Array:
    """Where it is, so that nothing passes through the host."""
    return cast(Array, to.xp.from_dlpack(library_of(array).detached(array)))


def _by_host(array: Array, to: Place) -> Array:
    """By way of an array of NumPy that can be written to, which each library takes."""
    numpy: Any = namespace_of(numpy_array())
    seen = numpy.from_dlpack(library_of(array).to_cpu(array))
    seen = numpy.astype(seen, seen.dtype, copy=True)
    take = to.xp.from_dlpack if to.library.reads_cpu_memory else to.xp.asarray
    return cast(Array, take(seen))
