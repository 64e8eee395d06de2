"""Integers, alone or many: lengths, offsets and ids."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from sdpa_xp._checks.messages import message, type_name
from sdpa_xp._checks.shapes import broadcast
from sdpa_xp._libraries import as_signed, dtype_name, is_array, plain
from sdpa_xp._libraries.protocols import AnyArray, Array, Device, Namespace, Shape

IntegersLike: TypeAlias = int | Sequence[int] | AnyArray
"""What a caller may pass for integers: one, a list of them, or an array of an integer dtype."""

LARGEST = 2**29
"""Indices are int32, which every library has, and an offset and a width are added to them."""


class Integers(NamedTuple):
    """Integers, with the smallest and the largest of them; infinite where they cannot be looked at."""

    values: int | Array
    least: float
    most: float

    def plus(self, number: int) -> Integers:
        """All of them, and `number` more."""
        return Integers(self.values + number, self.least + number, self.most + number)

    @property
    def shape(self) -> Shape:
        return () if isinstance(self.values, int) else self.values.shape


def integer(function: str, name: str, value: object, least: int = -LARGEST) -> int:
    """One integer, of Python or NumPy, that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        rule = f"`{name}` must be an integer"
        hint = "Inside a jit it has to be static." if is_array(value) else ""
        raise TypeError(message(function, rule, {name: _shown(value)}, hint))
    number = int(value)
    if not least <= number <= LARGEST:
        rule = f"`{name}` must be " + (f"at least {least}" if number < least else f"at most {LARGEST}")
        raise ValueError(message(function, rule, {name: number}))
    return number


def integers(
    function: str,
    name: str,
    value: object,
    xp: Namespace,
    device: Device,
    *,
    traced: bool,
    least: int = -LARGEST,
) -> Integers:
    """`value` as int32, where its values can be looked at each of them at least `least`."""
    if isinstance(value, list | tuple):
        checked = [integer(function, f"{name}[{index}]", each, least) for index, each in enumerate(value)]
        array = xp.asarray(checked, dtype=xp.int32, device=device)
        return Integers(array, min(checked, default=0), max(checked, default=0))
    if not is_array(value):
        number = integer(function, name, value, least)
        return Integers(number, number, number)
    _integral(function, name, value)
    whole, value = dtype_name(value.dtype) == "uint64", as_signed(plain(value))
    if traced or 0 in value.shape:
        return Integers(xp.astype(value, xp.int32, copy=False), -math.inf, math.inf)
    smallest, largest = int(xp.min(value)), int(xp.max(value))
    for number in (smallest + 2**64 if whole and smallest < 0 else smallest, largest):
        integer(function, name, number, least)
    return Integers(xp.astype(value, xp.int32, copy=False), smallest, largest)


def window(function: str, name: str, value: object) -> tuple[int, int]:
    """How far a window goes to the left and to the right: one integer for both, or two."""
    widths = value if isinstance(value, tuple | list) else (value, value)
    if len(widths) != 2:
        raise ValueError(message(function, f"`{name}` must be an integer or (left, right)", {name: value}))
    left, right = (integer(function, name, width, least=0) for width in widths)
    return left, right


def within(function: str, name: str, lengths: Integers, limit: int, letter: str) -> None:
    """No length goes beyond the axis that it is about, as far as the lengths can be looked at."""
    if lengths.most > limit and lengths.most != math.inf:
        rule = f"`{name}` must be at most {letter}"
        raise ValueError(message(function, rule, {name: int(lengths.most), letter: limit}))


def ids(function: str, name: str, value: object, xp: Namespace, device: Device) -> Array:
    """Integers that are compared and not counted with: an array keeps its dtype, and so its values."""
    if is_array(value):
        _integral(function, name, value)
        return as_signed(plain(value))
    found = integers(function, name, value, xp, device, traced=True).values
    return xp.asarray(found, dtype=xp.int32, device=device) if isinstance(found, int) else found


def one_each(function: str, name: str, shape: Shape, target: Shape, letter: str, hint: str = "") -> None:
    """`shape` has the length of `target` on its last axis, and its other axes broadcast to those of it."""
    if not shape or shape[-1] != target[-1] or broadcast(shape, target) != target:
        rule = f"`{name}` must have one integer for each of {letter}, (..., {letter})"
        got = {f"{name}.shape": shape, f"(..., {letter})": target}
        raise ValueError(message(function, rule, got, hint))


def _integral(function: str, name: str, array: Array) -> None:
    if not dtype_name(array.dtype).startswith(("int", "uint")):
        raise TypeError(message(function, f"`{name}` must hold integers", {f"{name}.dtype": array.dtype}))


def frozen(value: Any) -> Any:
    """A list as a tuple, so that what holds it stays as it is; an integer of NumPy as one of Python."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return tuple(value) if isinstance(value, list | range) else value


def _shown(value: object) -> str:
    return type_name(value) if is_array(value) else f"{value!r} ({type_name(value)})"
