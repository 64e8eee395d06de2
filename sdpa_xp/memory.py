"""Whether two arrays share memory, on whatever device they are."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sdpa_xp.namespace import library_name


class _Addresses:
    """The addresses of an array's elements, in the form that NumPy reads; they are compared, never followed."""

    def __init__(self, first: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "data": (first, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "version": 3,
        }


def share_memory(one: Any, other: Any) -> bool:
    """Return whether some element of one array is also an element of the other."""
    if one is other:
        return True
    views = [_view(array) for array in (one, other)]
    if any(view is None for view in views):
        return False  # views of such a library are copies to the caller
    return bool(import_module("numpy").shares_memory(*views))


def _view(array: Any) -> Any:
    """Return what NumPy can ask for addresses, or None if the library does not tell them."""
    numpy, library = import_module("numpy"), library_name(array)
    if library == "torch":
        size = array.element_size()
        strides = tuple(step * size for step in array.stride())
        return numpy.asarray(_Addresses(array.data_ptr(), tuple(array.shape), strides, size))
    if library == "cupy":
        return numpy.asarray(_Addresses(array.data.ptr, array.shape, array.strides, array.itemsize))
    array = getattr(array, "_array", array)  # array-api-strict holds an array of NumPy
    return array if isinstance(array, numpy.ndarray) else None
