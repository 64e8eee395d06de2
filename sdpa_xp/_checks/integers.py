"""Checks of lists of integers, from which shapes follow, so inside a jit an array of them must be static."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .._libraries import computing, is_array, library_of
from .._libraries.protocols import Array
from ..errors import ArgumentTypeError, ArgumentValueError, summary
from . import has_values
from .arrays import BOUNDS, check_plain_array
from .keywords import LARGEST_INTEGER, check_integer
from .score_arrays import is_integral


def exceeds(function: str, name: str, length: int, limit: int) -> bool:
    """Return whether a length exceeds a limit; a compiler that knows it by a symbol alone may not know that."""
    try:
        return length > limit
    except Exception as error:  # JAX has a class of its own for it
        rule = f"`{name}` must have room for each length that a symbol stands for"
        raise ArgumentValueError(function, rule, {"its error": summary(error)}, BOUNDS) from error


def as_lists(value: Any) -> Any:
    """Return an array whose elements can be read now as nested lists; any other value unchanged."""
    return library_of(value).to_list(value) if is_array(value) and has_values(value) else value


def check_cumulative_lengths(
    function: str, name: str, value: object, arrays: Mapping[str, Array], axis: int
) -> list[int]:
    """Check N + 1 nondecreasing integers from 0 to the length of `arrays` on `axis`, and return them.

    They are the starts of N sequences, followed by the end of the last one. The arrays have the same length.
    """
    starts = check_integer_list(function, name, value)
    letter, array = next(iter(arrays.items()))
    total = array.shape[axis]
    got = {name: starts, f"length of `{letter}`": total}
    if len(starts) < 2:
        raise ArgumentValueError(function, f"`{name}` must have N + 1 integers for N >= 1 sequences", got)
    if starts[0] != 0 or starts[-1] != total:
        rule = f"`{name}` must begin with 0 and end with the length of `{letter}`"
        raise ArgumentValueError(function, rule, got, _slice_hint(starts, arrays, axis))
    if any(later < earlier for earlier, later in itertools.pairwise(starts)):
        raise ArgumentValueError(function, f"`{name}` must not decrease", got)
    return starts


def _slice_hint(starts: list[int], arrays: Mapping[str, Array], axis: int) -> str:
    """Return how to slice off the rows after the last sequence, or "" if there are none."""
    array = next(iter(arrays.values()))
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > array.shape[axis]:
        return ""
    index = ", ".join([":"] * (array.ndim + axis) + [f":{starts[-1]}"])
    return f"Slice off the rows after the last sequence: {' and '.join(f'{name}[{index}]' for name in arrays)}."


def read_together(like: Array, *values: Any) -> tuple[Any, ...]:
    """Return values with integer arrays as lists, if these are on the accelerator that `like` is on.

    Each read of an accelerator waits for it, so all are read at once. Arrays that a check refuses are returned.
    """
    library = library_of(like)
    device = library.device(like)
    if not library.is_accelerator(device):
        return values
    arrays = [value for value in values if is_array(value)]
    if len(arrays) < 2 or not all(_is_readable(value, arrays[0], like) for value in arrays):
        return values
    xp = library.namespace(like)
    with computing(like):
        rest = iter(library.to_list(xp.concat([xp.reshape(array, (-1,)) for array in arrays], axis=0)))

    def next_lists(array: Array) -> list[Any]:
        if array.ndim == 1:
            return list(itertools.islice(rest, array.shape[0]))
        return [list(itertools.islice(rest, array.shape[1])) for _ in range(array.shape[0])]

    return tuple(next_lists(value) if is_array(value) else value for value in values)


def _is_readable(array: Array, first: Array, like: Array) -> bool:
    library = library_of(like)
    is_alike = library_of(array) is library and library.device(array) == library.device(like)
    has_integers = is_integral(array) and array.dtype == first.dtype
    return is_alike and array.ndim in (1, 2) and has_integers and has_values(array)


def check_same_length(function: str, named: Mapping[str, Sequence[object]]) -> None:
    """Check that all sequences have the same length."""
    if len({len(values) for values in named.values()}) > 1:
        rule = " and ".join(f"`{name}`" for name in named) + " must have the same length"
        raise ArgumentValueError(function, rule, {f"len({name})": len(x) for name, x in named.items()})


def check_integer_list(
    function: str, name: str, value: object, least: int = 0, most: float = LARGEST_INTEGER
) -> list[int]:
    """Check integers from `least` to `most`, and return them as a list."""
    items = enumerate(_to_list(function, name, value))
    return [check_integer(function, f"{name}[{index}]", item, least, most) for index, item in items]


def check_some_integers(function: str, name: str, value: object, least: int = 1) -> list[int]:
    """Check one integer or more, each at least `least`, and return them."""
    integers = check_integer_list(function, name, value, least)
    if not integers:
        raise ArgumentValueError(function, f"`{name}` must hold at least one integer", {name: value})
    return integers


def check_integers_or_rows(function: str, name: str, value: object) -> list[Any]:
    """Check integers, or rows of them, and return them as lists."""
    items = _to_list(function, name, value)
    if any(isinstance(item, list | tuple | range) or is_array(item) for item in items):
        return check_integer_rows(function, name, items)
    return check_integer_list(function, name, items, least=-LARGEST_INTEGER)


def check_integer_rows(
    function: str, name: str, value: object, least: int = -LARGEST_INTEGER
) -> list[list[int]]:
    """Check rows of integers, each at least `least`, and return them as lists."""
    rows = enumerate(_to_list(function, name, value))
    return [check_integer_list(function, f"{name}[{n}]", row, least) for n, row in rows]


def _to_list(function: str, name: str, value: object) -> list[Any]:
    if isinstance(value, list | tuple | range):
        return list(value)
    if not is_array(value) or value.ndim == 0:
        rule = f"`{name}` must be a list or an integer array"
        raise ArgumentTypeError(function, rule, {name: repr(value)})
    check_plain_array(function, name, value)
    if not has_values(value):
        rule = f"`{name}` must be static inside a jit or a lazy graph, since shapes follow from it"
        raise ArgumentTypeError(
            function, rule, {name: f"a traced array {value.shape}"}, "Pass a tuple of ints."
        )
    if not is_integral(value):
        rule = f"`{name}` must hold integers"
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": value.dtype})
    items: list[Any] = library_of(value).to_list(value)
    return items
