"""NumPy's functions with `out`, which write their result into an existing array, and with `reduce`.

Neither `out` nor `reduce` is in the standard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sdpa_xp._libraries.protocols import Array


class InPlaceFunctions(Protocol):
    """The functions of a library's own module that take `out`, as NumPy's and torch's do."""

    def abs(self, x: Array, /, *, out: Array) -> Array: ...
    def exp(self, x: Array, /, *, out: Array) -> Array: ...
    def matmul(self, x: Array, y: Array, /, *, out: Array) -> Array: ...
    def multiply(self, x: Array, y: Array | float, /, *, out: Array) -> Array: ...
    def stack(self, arrays: Sequence[Array], /, *, out: Array) -> Array: ...
    def tanh(self, x: Array, /, *, out: Array) -> Array: ...


class Ufunc(Protocol):
    """A function that also reduces an axis."""

    def reduce(self, x: Array, /, *, axis: int | None, keepdims: bool = ..., initial: float = ...) -> Any: ...


class Ufuncs(InPlaceFunctions, Protocol):
    """The functions of NumPy's own module. `reduce` takes a third of the time of `max` and `sum`."""

    @property
    def add(self) -> Ufunc: ...
    @property
    def maximum(self) -> Ufunc: ...
    def swapaxes(self, x: Array, first: int, second: int, /) -> Array: ...


def exp_in_place(functions: InPlaceFunctions, array: Array) -> Array:
    """Return exp of an array, in its memory."""
    return functions.exp(array, out=array)
