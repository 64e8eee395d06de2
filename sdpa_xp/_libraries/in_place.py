"""Functions that write their result into an array that exists. `out` is not in the standard."""

from __future__ import annotations

from typing import Protocol

from sdpa_xp._libraries.protocols import Array


class InPlaceFunctions(Protocol):
    """The functions of a library's own module that take `out`, as NumPy's and torch's do."""

    def exp(self, x: Array, /, *, out: Array) -> Array: ...
    def matmul(self, x: Array, y: Array, /, *, out: Array) -> Array: ...
    def multiply(self, x: Array, y: Array, /, *, out: Array) -> Array: ...
    def tanh(self, x: Array, /, *, out: Array) -> Array: ...


def exp_in_place(functions: InPlaceFunctions, array: Array) -> Array:
    """Return exp of an array, in its memory."""
    return functions.exp(array, out=array)
