"""Arrays of positions, and the angles of positions and frequencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, cast

from .._checks.arrays import check_floating, check_one_device, check_one_library, check_plain_array
from .._checks.keywords import check_integer
from .._libraries import (
    FLOATING,
    access_of,
    computing,
    dtype_name,
    has_override,
    is_number,
    library_of,
    numpy_array,
    widest_dtype,
    with_axes,
)
from .._libraries.protocols import AnyArray, Array, Device, Namespace
from ..errors import ArgumentTypeError

PositionsLike: TypeAlias = range | Sequence[int] | AnyArray
"""One integer for each token, or an array of numbers."""


class Consecutive(NamedTuple):
    """Positions that follow one another: number n is at position first + shift + n."""

    first: int | list[int] | Array
    """One for all batch entries, or one for each, (...)."""
    shift: int = 0

    def moved(self, by: int) -> Consecutive:
        """Return the positions from number `by` on."""
        # A length of a graph is no number, so nothing is added to it if `shift` is 0.
        return Consecutive(self.first, self.shift + by if self.shift else by)

    @property
    def is_from_zero(self) -> bool:
        """Return whether number n is at position n."""
        return isinstance(self.first, int) and isinstance(self.shift, int) and self.first + self.shift == 0


class ArrayFactory(NamedTuple):
    """The library and the device that arrays of positions and angles are made for."""

    function: str
    """The public function, for messages."""
    xp: Namespace
    device: Device
    arrays: Mapping[str, Array]
    """The arrays by their names in messages, whose library and device it is."""

    def computing(self) -> AbstractContextManager[object]:
        """Return the context that arrays are computed in."""
        return computing(next(iter(self.arrays.values()), None))

    def arange(self, start: int, stop: int) -> Array:
        """Return the int32 from `start` up to `stop`."""
        return self.xp.arange(start, stop, dtype=self.xp.int32, device=self.device)

    def consecutive(self, positions: Consecutive, length: int) -> Array:
        """Return the first `length` positions as int32, (L,); or (..., L) if batch entries differ."""
        first, shift = positions
        if isinstance(first, int) and isinstance(shift, int) and first + shift >= 0:
            first, shift = 0, first + shift
        numbers = self.arange(shift, shift + length)  # a length of a graph takes no negative number
        if isinstance(first, int):
            return numbers + first if first else numbers
        if isinstance(first, list):
            first = self.xp.asarray(first, dtype=self.xp.int32, device=self.device)
        first = self.xp.expand_dims(first, axis=-1)
        return first + with_axes(numbers, first.ndim)

    def angles(self, positions: Array, frequencies: Sequence[float]) -> Array:
        """Return position * frequency, (..., len(frequencies)), in float64 if the device has it.

        In float32 the angle of position 100,000 would be off by up to 0.004.
        """
        dtype = widest_dtype(self.function, positions)
        factors = self.xp.asarray(frequencies, dtype=dtype, device=self.device)
        factors = with_axes(factors, positions.ndim + 1)
        return self.xp.expand_dims(self.xp.astype(positions, dtype, copy=False), axis=-1) * factors


def array_factory(
    function: str,
    positions: object,
    like: object,
    name: str = "like",
    tables: Mapping[str, object] = MappingProxyType({}),
) -> ArrayFactory:
    """Return the factory for the library and device of `like`, `positions` and the `tables` of a rotation.

    They must be the same. If none is an array, the factory is NumPy's. `name` is what messages call `like`.
    """
    named = {} if like is None else {name: like}
    if not (is_number(positions) or isinstance(positions, range | list | tuple)):
        named["positions"] = positions
    if not has_override(*named.values()):  # in a graph, the tables are constants
        named |= tables
    xp, arrays = check_one_library(function, named or {"like": numpy_array()})
    check_one_device(function, arrays)
    if like is not None:
        check_floating(function, name, arrays[name])
    first = next(iter(arrays.values()))
    return ArrayFactory(function, xp, library_of(first).device(first), arrays)


def as_array(function: str, positions: PositionsLike, factory: ArrayFactory) -> Array:
    """Convert positions to an array of numbers, of any shape."""
    if isinstance(positions, range):
        for end in (positions.start, positions.stop):
            check_integer(function, "positions", end)
        # By arithmetic, since a range may be longer than a list should be, and step down.
        return factory.arange(0, len(positions)) * positions.step + positions.start
    if isinstance(positions, list | tuple):
        integers = [check_integer(function, f"positions[{n}]", p) for n, p in enumerate(positions)]
        return factory.xp.asarray(integers, dtype=factory.xp.int32, device=factory.device)
    array = check_plain_array(function, "positions", positions)
    dtype = dtype_name(array.dtype)
    if dtype not in FLOATING and not dtype.startswith(("int", "uint")):
        raise ArgumentTypeError(function, "`positions` must hold numbers", {"positions.dtype": array.dtype})
    return array


def are_readable(positions: Array) -> bool:
    """Return whether positions can be read for a check without waiting for a device."""
    return access_of([positions]).is_writeable


def as_positions(function: str, positions: PositionsLike | int) -> PositionsLike:
    """Convert a length L to the positions range(L); other positions pass through unchanged."""
    if is_number(positions):
        return range(check_integer(function, "positions", positions, least=0))
    return cast(PositionsLike, positions)
