"""The addresses of an array on any device: in a form that NumPy can compare, and whether some repeat."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any


class Addresses:
    """The addresses of an array's elements in NumPy's array interface. They are compared and never read."""

    def __init__(self, first: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "data": (first, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "version": 3,
        }

    def as_array(self) -> Any:
        """Return a NumPy array at these addresses. Its elements must not be read."""
        return import_module("numpy").asarray(self)


def has_repeats(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether several elements may have one address, as in a broadcast view or a sliding window.

    They have not if each axis steps over all elements of the axes with smaller steps.
    """
    end = itemsize
    for step, length in sorted((abs(step), n) for step, n in zip(strides, shape, strict=True) if n > 1):
        if step < end:
            return 0 not in shape
        end += step * (length - 1)
    return False
