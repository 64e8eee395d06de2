"""Positions as an array, and the angles that a frequency makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

from sdpa_xp import _checks as checks
from sdpa_xp._libraries import device_of, is_number, numpy_array, widest_dtype
from sdpa_xp._libraries.protocols import AnyArray, Array, Device, Namespace

PositionsLike: TypeAlias = range | Sequence[int] | AnyArray
"""What a caller may pass: one integer for each token, or an array of numbers."""


class Place(NamedTuple):
    """Where arrays are to be made."""

    xp: Namespace
    device: Device

    def numbers(self, start: int, stop: int) -> Array:
        """start, ..., stop - 1 in int32."""
        return self.xp.arange(start, stop, dtype=self.xp.int32, device=self.device)

    def following(self, starts: int | list[int], length: int) -> Array:
        """`length` positions from the start on, (L,); or from each of N starts, (N, L)."""
        if not isinstance(starts, list):
            return self.numbers(starts, starts + length)
        first = self.xp.asarray(starts, dtype=self.xp.int32, device=self.device)
        return self.xp.expand_dims(first, axis=-1) + self.numbers(0, length)

    def angles(self, positions: Array, frequencies: Sequence[float]) -> Array:
        """position * frequency, (..., len(frequencies)), in float64 where the device has it.

        In float32 the angle of position 100,000 is off by up to 0.004.
        """
        wide = widest_dtype(positions)
        factors = self.xp.asarray(frequencies, dtype=wide, device=self.device)
        return self.xp.expand_dims(self.xp.astype(positions, wide, copy=False), axis=-1) * factors


def place(function: str, positions: object, like: object, name: str = "like") -> Place:
    """That of `like` and of `positions`, which must agree; NumPy's where neither is an array."""
    named = {} if like is None else {name: like}
    if not (is_number(positions) or isinstance(positions, range | list | tuple)):
        named["positions"] = positions
    xp, arrays = checks.one_library(function, named or {"like": numpy_array()})
    checks.one_device(function, arrays)
    if like is not None:
        checks.floating(function, name, arrays[name])
    return Place(xp, device_of(next(iter(arrays.values()))))


def as_array(function: str, positions: PositionsLike, at: Place) -> Array:
    """Positions of any shape, as an array of numbers."""
    if isinstance(positions, range):
        for end in (positions.start, positions.stop):
            checks.integer(function, "positions", end)
        return at.numbers(0, len(positions)) * positions.step + positions.start
    if isinstance(positions, list | tuple):
        listed = [checks.integer(function, f"positions[{n}]", p) for n, p in enumerate(positions)]
        return at.xp.asarray(listed, dtype=at.xp.int32, device=at.device)
    return checks.real_numbers(function, "positions", positions)


def first(function: str, positions: PositionsLike | int) -> PositionsLike:
    """A length as the positions of so many tokens, from 0 on."""
    if is_number(positions):
        return range(checks.integer(function, "positions", positions, least=0))
    return cast(PositionsLike, positions)
