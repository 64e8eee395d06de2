"""Copy an array to another library: by DLPack, or through the CPU where DLPack cannot carry it.

DLPack moves nothing: CuPy takes no arrays on the CPU, and libraries without CUDA take none of CuPy. Dask has no
DLPack, and JAX refuses read-only arrays of NumPy and slices. NumPy and array-api-strict have no bfloat16, so
that NumPy cannot pass it on either.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from sdpa_xp._checks.messages import shown
from sdpa_xp._libraries import (
    CPU,
    Library,
    device_of,
    dtype_name,
    is_array,
    library_of,
    namespace_of,
    numpy_array,
    quiet,
)
from sdpa_xp._libraries.protocols import Array, Device
from sdpa_xp.errors import ArgumentTypeError


class Destination(NamedTuple):
    """The library and the device that arrays are copied to."""

    xp: Any
    library: Library
    device: Device
    """None is the library's default."""


def destination_of(function: str, like: Any, device: Device = None) -> Destination:
    """Return the destination that `like`, a library or an array, stands for; `device` overrides the array's."""
    is_module = not is_array(like)
    if is_module and not callable(getattr(like, "zeros", None)):
        rule = "`like` must be a library of arrays, or an array of it"
        raise ArgumentTypeError(function, rule, {"like": shown(like)})
    array: Array = like.zeros((0,)) if is_module else like
    if device is None and not is_module:
        device = device_of(array)
    return Destination(namespace_of(array), library_of(array), device)


def copy_to(array: Array, destination: Destination) -> Array:
    """Return a copy of `array` at the destination, in the same dtype if the library has that, else float32."""
    is_bfloat16 = dtype_name(array.dtype) == "bfloat16"
    source, target = library_of(array), destination.library
    array = source.detach(array)
    with quiet(array):
        held_on = cast(Any, array).__dlpack_device__()[0] if source.exchanges_memory else CPU
        in_any_order = target.takes_strides or held_on != CPU
        if source.exchanges_memory and in_any_order and target.takes_memory(held_on):
            copy = destination.xp.from_dlpack(array)  # on the device where it is
        else:
            if is_bfloat16:  # NumPy, which such a copy goes through, has no bfloat16
                xp = namespace_of(array)
                array = xp.astype(array, xp.float32)
            copy = _copy_by_numpy(array, destination)
    dtype = target.bfloat16(destination.xp) if is_bfloat16 else None
    with quiet(copy):
        copy = cast(Array, destination.xp.astype(copy, copy.dtype if dtype is None else dtype, copy=True))
    is_there = destination.device is None or device_of(copy) == destination.device
    return copy if is_there else target.on_device(copy, destination.device)


def _copy_by_numpy(array: Array, destination: Destination) -> Array:
    """Return a copy made from a writeable NumPy array in the order of rows, which every library takes."""
    numpy: Any = namespace_of(numpy_array())
    computed = library_of(array).to_cpu(array)
    view = numpy.from_dlpack(library_of(computed).to_cpu(computed))  # chunks of Dask may be on a device
    on_cpu = numpy.asarray(view, copy=True, order="C")
    convert = destination.xp.from_dlpack if destination.library.takes_memory(CPU) else destination.xp.asarray
    return cast(Array, convert(on_cpu))
