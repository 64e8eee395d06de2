"""What positions, and the rotations that follow from them, are made of."""

from __future__ import annotations

import math

from sdpa_xp._checks.arrays import plain_array
from sdpa_xp._checks.integers import Integers, integer
from sdpa_xp._checks.keywords import number
from sdpa_xp._checks.messages import message, type_name
from sdpa_xp._libraries import FLOATING, dtype_name, is_number
from sdpa_xp._libraries.protocols import Array, Shape


def real_numbers(function: str, name: str, value: object) -> Array:
    """An array of integers or of real floating numbers."""
    array = plain_array(function, name, value)
    dtype = dtype_name(array.dtype)
    if dtype not in FLOATING and not dtype.startswith(("int", "uint")):
        raise TypeError(message(function, f"`{name}` must hold numbers", {f"{name}.dtype": array.dtype}))
    return array


def several(function: str, name: str, value: object) -> object:
    """Not one number, which might be a position as well as a length."""
    if is_number(value):
        hint = "range(n) is for the first n."
        raise TypeError(message(function, f"`{name}` must be a range, a list or an array", {name: value}, hint))
    return value


def even(function: str, name: str, value: object) -> int:
    """An even integer of at least 2."""
    result = integer(function, name, value, least=2)
    if result % 2:
        raise ValueError(message(function, f"`{name}` must be even", {name: result}))
    return result


def above(function: str, name: str, value: object, limit: float) -> float:
    """A number greater than `limit`."""
    result = number(function, name, value)
    if result <= limit:
        raise ValueError(message(function, f"`{name}` must be greater than {limit:g}", {name: result}))
    return result


def below(function: str, name: str, numbers: Integers, limit: int, letter: str) -> None:
    """No number goes beyond a table of so many rows, as far as the numbers can be looked at."""
    if numbers.most >= limit and numbers.most != math.inf:
        rule = f"`{name}` must be below {letter}"
        raise ValueError(message(function, rule, {name: int(numbers.most), letter: limit}))


def instance(function: str, name: str, value: object, kind: type) -> None:
    """One of `kind`, or None."""
    if value is not None and not isinstance(value, kind):
        rule = f"`{name}` must be a {kind.__name__} or None"
        raise TypeError(message(function, rule, {name: type_name(value)}))


def rotated(function: str, name: str, shape: Shape, width: int) -> None:
    """There are tokens, and their width is that of the rotation or more."""
    if len(shape) < 2 or shape[-1] < width:
        rule = f"`{name}` must have a length, and a width (axis -1, E) of at least that of the rotation"
        raise ValueError(message(function, rule, {f"{name}.shape": shape, "rotary.width": width}))
