"""An array in another library: by DLPack, and around what DLPack does not carry.

Dask has none; JAX takes no read-only array of NumPy by it, and CuPy none of the CPU; NumPy and
array-api-strict have no bfloat16, and NumPy gives none.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from sdpa_xp import checks, namespace
from sdpa_xp.protocols import Array, Device


class Place(NamedTuple):
    """Where arrays go."""

    xp: Any
    library: str
    device: Device
    """None is the library's default."""


def place(function: str, like: Any, device: Device = None) -> Place:
    """The library that `like` is, or is an array of; then its device, if no other is named."""
    module = not namespace.is_array(like)
    if module:
        checks.module_of_arrays(function, like)
    array: Array = like.zeros((0,)) if module else like
    if device is None and not module:
        device = namespace.device(array)
    return Place(namespace.namespace(array), namespace.library_name(array), device)


def moved(array: Array, to: Place) -> Array:
    """A copy of `array`, in its own dtype where the library has that, else in float32."""
    half = namespace.dtype_name(array.dtype) == "bfloat16"
    on_device = "other" not in (to.library, namespace.library_name(array))
    if half and not on_device:
        own = namespace.namespace(array)
        array = own.astype(array, own.float32)
    copy = _by_dlpack(array, to) if on_device else _by_host(array, to)
    dtype = to.xp.bfloat16 if half and hasattr(to.xp, "bfloat16") else copy.dtype
    copy = cast(Array, to.xp.astype(copy, dtype, copy=True))
    there = to.device is None or namespace.device(copy) == to.device
    return copy if there else namespace.placed(copy, to.device)


def _by_dlpack(array: Any, to: Place) -> Array:
    """Where it is, so that nothing passes through the host."""
    detached = array.detach() if namespace.library_name(array) == "torch" else array
    return cast(Array, to.xp.from_dlpack(detached))


def _by_host(array: Array, to: Place) -> Array:
    """By way of an array of NumPy that can be written to, which each library takes."""
    numpy: Any = namespace.namespace(namespace.numpy_array())
    seen = numpy.from_dlpack(namespace.on_host(array))
    seen = numpy.astype(seen, seen.dtype, copy=True)
    take = to.xp.from_dlpack if to.library in ("torch", "jax", "mlx") else to.xp.asarray
    return cast(Array, take(seen))
