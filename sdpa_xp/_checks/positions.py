"""Checks of positions and of rotations by them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sdpa_xp._checks.arrays import check_plain_array
from sdpa_xp._checks.messages import shown
from sdpa_xp._checks.numbers import Integers, check_integer, check_number
from sdpa_xp._libraries import FLOATING, dtype_name, is_number
from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError


def check_real_numbers(function: str, name: str, value: object) -> Array:
    """Check an array of integers or of real floating numbers, and return it."""
    array = check_plain_array(function, name, value)
    dtype = dtype_name(array.dtype)
    if dtype not in FLOATING and not dtype.startswith(("int", "uint")):
        raise ArgumentTypeError(function, f"`{name}` must hold numbers", {f"{name}.dtype": array.dtype})
    return array


def refuse_one_number(function: str, name: str, value: object) -> object:
    """Refuse a single number, which could be a position or a length, and return other values."""
    if is_number(value):
        hint = "For the first n positions, pass range(n)."
        raise ArgumentTypeError(function, f"`{name}` must be a range, a list or an array", {name: value}, hint)
    return value


def check_even(function: str, name: str, value: object) -> int:
    """Check an even integer of at least 2, and return it."""
    result = check_integer(function, name, value, least=2)
    if result % 2:
        raise ArgumentValueError(function, f"`{name}` must be even", {name: result})
    return result


def check_above(function: str, name: str, value: object, limit: float) -> float:
    """Check a number greater than `limit`, and return it."""
    result = check_number(function, name, value)
    if result <= limit:
        raise ArgumentValueError(function, f"`{name}` must be greater than {limit:g}", {name: result})
    return result


def check_below(function: str, name: str, numbers: Integers, limit: int, letter: str) -> None:
    """Check that all numbers are below `limit`, the rows of a table, if the numbers can be read."""
    if numbers.most >= limit and numbers.most != math.inf:
        rule = f"`{name}` must be below {letter}"
        raise ArgumentValueError(function, rule, {name: int(numbers.most), letter: limit})


def check_instance(function: str, name: str, value: object, kind: type, word: str = "", hint: str = "") -> None:
    """Check that `value` is an instance of `kind`, called `word` in the message, or None."""
    if value is not None and not isinstance(value, kind):
        rule = f"`{name}` must be a {word or kind.__name__} or None"
        raise ArgumentTypeError(function, rule, {name: shown(value)}, hint)


def check_rotary(function: str, value: object, kind: type) -> None:
    """Check the `rotary` of a cache."""
    hint = "A `RotaryTables` takes your own cosines and sines." if isinstance(value, tuple | list) else ""
    check_instance(function, "rotary", value, kind, "Rotary", hint)


def check_fits_rotation(function: str, name: str, shape: Shape, width: int) -> None:
    """Check that there is a length, and a width of at least that of the rotation."""
    if len(shape) < 2 or shape[-1] < width:
        rule = f"`{name}` must have at least 2 axes, and a width (axis -1, E) of at least `rotary.width`"
        is_doubled = len(shape) > 1 and width == 2 * shape[-1]
        hint = "If tables have each number twice, pass one half of each row." if is_doubled else ""
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape, "rotary.width": width}, hint)


def check_rotation_tables(function: str, shapes: Mapping[str, Shape]) -> None:
    """Check that cosines and sines have one shape, with a row for each position and a column for each pair."""
    cos, sin = shapes.values()
    if cos != sin or len(cos) < 2 or cos[-1] == 0:
        rule = "`cos` and `sin` must have one shape, (P, width / 2) or (..., P, width / 2)"
        raise ArgumentValueError(function, rule, {"cos.shape": cos, "sin.shape": sin})


def check_within_tables(function: str, least: int, most: int, rows: int) -> None:
    """Check that the tables of a rotation have a row for each position."""
    if least <= most and not 0 <= least <= most < rows:
        rule = "the tables of the rotary must have a row for each position"
        hint = (
            ""
            if least >= 0
            else "Scores depend on distances alone: add one number to all positions of an entry."
        )
        raise ArgumentValueError(function, rule, {"positions": f"{least} to {most}", "rows": rows}, hint)
