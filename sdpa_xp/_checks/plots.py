"""Checks of plots: numbers must be readable now, and each tick must have a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdpa_xp._checks.arrays import check_boolean, check_floating, check_plain_array
from sdpa_xp._checks.messages import shown
from sdpa_xp._checks.numbers import check_integer, check_integer_list
from sdpa_xp._checks.shapes import check_broadcasts
from sdpa_xp._libraries import is_number, is_traced, library_of, namespace_of, numpy_array
from sdpa_xp._libraries.protocols import Array, Shape
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError


def check_weights(function: str, value: object) -> list[list[list[float]]]:
    """Check weights (L, S) or (Hq, L, S), none below 0, and return them as lists for each head."""
    array = check_plain_array(function, "weights", value)
    check_floating(function, "weights", array)
    if array.ndim not in (2, 3):
        rule = "`weights` must be (L, S) or (Hq, L, S)"
        hint = "One entry of a batch is weights[0, ...]." if array.ndim > 3 else ""
        raise ArgumentValueError(function, rule, {"weights.shape": array.shape}, hint)
    check_not_empty(function, "weights.shape", array.shape)
    numbers: Any = check_readable(function, "weights", array)
    heads = numbers if array.ndim == 3 else [numbers]
    if any(weight < 0 for rows in heads for row in rows for weight in row):
        least = min(weight for rows in heads for row in rows for weight in row)
        hint = "Compute them with `attention_weights`; scores are not weights."
        raise ArgumentValueError(function, "`weights` must not be below 0", {"smallest weight": least}, hint)
    return [[[float(weight) for weight in row] for row in rows] for rows in heads]


def check_allowed(function: str, value: Array, shape: Shape) -> Array:
    """Check a boolean array that broadcasts to the weights, and return it in their shape."""
    check_boolean(function, "mask", value)
    check_broadcasts(function, "mask", value.shape, shape, "(Hq, L, S)" if len(shape) == 3 else "(L, S)")
    return namespace_of(value).broadcast_to(value, shape)


def check_not_empty(function: str, name: str, shape: Shape) -> None:
    """Check that there is something to draw."""
    if 0 in shape:
        raise ArgumentValueError(function, f"`{name}` must have no axis of length 0", {name: shape})


def check_readable(function: str, name: str, array: Array) -> Any:
    """Check that the numbers of an array can be read, and return them in nested lists."""
    if is_traced(array) and library_of(array).chunks is None:
        rule = f"`{name}` must have numbers that can be read now, so not inside a jit"
        raise ArgumentTypeError(function, rule, {name: shown(array)})
    return library_of(array).to_list(array)


def check_tokens(function: str, name: str, value: object, count: int, letter: str) -> Sequence[str] | None:
    """Check a name for each query or key, or None, and return it."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or any(type(x) is not str for x in value):
        raise ArgumentTypeError(function, f"`{name}` must be a list of strings", {name: repr(value)})
    if len(value) != count:
        rule = f"`{name}` must have one string for each entry of its axis of `weights` ({letter})"
        raise ArgumentValueError(function, rule, {f"len({name})": len(value), letter: count})
    return value


def check_heads(function: str, value: object, count: int) -> list[int]:
    """Check the numbers of heads, and return them in a list; None is all heads."""
    if value is None:
        return [*range(count)]
    if is_number(value):
        chosen = [check_integer(function, "heads", value, least=0)]
    else:
        chosen = check_lengths(function, "heads", value, least=0)
    if max(chosen) >= count:
        rule = "`heads` must be below Hq, the number of heads of `weights`"
        raise ArgumentValueError(function, rule, {"heads": value, "Hq": count})
    return chosen


def check_lengths(function: str, name: str, value: object, least: int = 1) -> list[int]:
    """Check one integer or more, each at least `least`, and return them."""
    integers = check_integer_list(function, name, value, least)
    if not integers:
        raise ArgumentValueError(function, f"`{name}` must hold at least one integer", {name: value})
    return integers


def check_numpy_generator(function: str, rng: object) -> Any:
    """Check that `rng` is a numpy.random.Generator, and return it."""
    if not library_of(numpy_array()).is_rng(rng):
        hint = "Pass one, so that you can reproduce the picture."
        rule = "`rng` must be a numpy.random.Generator"
        raise ArgumentTypeError(function, rule, {"rng": shown(rng)}, hint)
    return rng
