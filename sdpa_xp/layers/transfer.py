"""Copy an array to another library: by DLPack, or through NumPy where DLPack cannot carry it.

DLPack does not cover everything: Dask has none. JAX refuses read-only arrays of NumPy, and CuPy refuses arrays
on the CPU. NumPy and array-api-strict have no bfloat16, so that NumPy cannot pass it on either.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import Library, device_of, dtype_name, is_array, library_of, namespace_of, numpy_array
from sdpa_xp._libraries.protocols import Array, Device


class Destination(NamedTuple):
    """The library and the device that arrays are copied to."""

    xp: Any
    library: Library
    device: Device
    """None is the library's default."""


def destination_of(function: str, like: Any, device: Device = None) -> Destination:
    """Return the destination that `like`, a library or an array, stands for; `device` overrides the array's."""
    is_module = not is_array(like)
    if is_module:
        checks.module_of_arrays(function, like)
    array: Array = like.zeros((0,)) if is_module else like
    if device is None and not is_module:
        device = device_of(array)
    return Destination(namespace_of(array), library_of(array), device)


def copy_to(array: Array, destination: Destination) -> Array:
    """Return a copy of `array` at the destination, in the same dtype if the library has that, else float32."""
    is_bfloat16 = dtype_name(array.dtype) == "bfloat16"
    stays_on_device = destination.library.exchanges_memory and library_of(array).exchanges_memory
    if is_bfloat16 and not stays_on_device:  # NumPy, which such a copy goes through, has no bfloat16
        source_xp = namespace_of(array)
        array = source_xp.astype(array, source_xp.float32)
    copy = _copy_by_dlpack(array, destination) if stays_on_device else _copy_by_numpy(array, destination)
    dtype = destination.xp.bfloat16 if is_bfloat16 and hasattr(destination.xp, "bfloat16") else copy.dtype
    copy = cast(Array, destination.xp.astype(copy, dtype, copy=True))
    is_there = destination.device is None or device_of(copy) == destination.device
    return copy if is_there else library_of(copy).on_device(copy, destination.device)


def _copy_by_dlpack(array: Any, destination: Destination) -> Array:
    """Return `array` in the other library, on the device where it is: nothing passes through the CPU."""
    return cast(Array, destination.xp.from_dlpack(library_of(array).detach(array)))


def _copy_by_numpy(array: Array, destination: Destination) -> Array:
    """Return a copy made from a writeable NumPy array, which every library takes."""
    numpy: Any = namespace_of(numpy_array())
    view = numpy.from_dlpack(library_of(array).to_cpu(array))
    on_cpu = numpy.astype(view, view.dtype, copy=True)
    convert = destination.xp.from_dlpack if destination.library.reads_cpu_memory else destination.xp.asarray
    return cast(Array, convert(on_cpu))
