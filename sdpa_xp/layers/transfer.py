"""Copy an array to another library: by DLPack on a GPU, and else through NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from sdpa_xp._checks.messages import shown
from sdpa_xp._libraries import computing, is_array, library_of
from sdpa_xp._libraries.base import CUDA, Library
from sdpa_xp._libraries.dtypes import dtype_name
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
    library = library_of(array)
    if device is None and not is_module:
        device = library.device(array)
    return Destination(library.namespace(array), library, device)


def copy_to(array: Array, destination: Destination) -> Array:
    """Return a copy of `array` at the destination, in the same dtype if the library has that, else float32."""
    source, target = library_of(array), destination.library
    is_bfloat16 = dtype_name(array.dtype) == "bfloat16"
    array = source.detach(array)
    with computing(array):
        # On a GPU, arrays stay there. On the CPU, libraries differ in which arrays they take by DLPack.
        on_cuda = hasattr(array, "__dlpack_device__") and cast(Any, array).__dlpack_device__()[0] in CUDA
        if on_cuda and target.takes_cuda():
            copy = destination.xp.from_dlpack(array)
        else:
            values = source.to_numpy(array)
            values = values.astype("float32") if is_bfloat16 else values
            copy = target.from_numpy(values, destination.xp, destination.device)
    dtype = target.bfloat16(destination.xp) if is_bfloat16 else None
    with computing(copy):
        copy = cast(Array, destination.xp.astype(copy, copy.dtype if dtype is None else dtype, copy=True))
    is_there = destination.device is None or target.device(copy) == destination.device
    return copy if is_there else destination.xp.asarray(copy, device=destination.device)
