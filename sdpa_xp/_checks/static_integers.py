"""Checks of integers that determine shapes: they are read now, so an array inside a jit must be static."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sdpa_xp._checks.arrays import plain_array
from sdpa_xp._checks.integers import LARGEST, integer, is_integral
from sdpa_xp._libraries import device_of, is_array, is_traced, library_of, quiet
from sdpa_xp._libraries.protocols import Array
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError


def cumulative_lengths(
    function: str, name: str, value: object, arrays: Mapping[str, Array], axis: int
) -> list[int]:
    """Check N + 1 nondecreasing integers from 0 to the length of `arrays` on `axis`, and return them.

    They are the starts of N sequences, followed by the end of the last one. The arrays have the same length.
    """
    starts = integer_list(function, name, value)
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
    library, device = library_of(like), device_of(like)
    if not library.is_accelerator(device):
        return values
    arrays = [value for value in values if is_array(value)]
    if len(arrays) < 2 or not all(_is_readable(value, arrays[0], like) for value in arrays):
        return values
    xp = library.namespace(like)
    with quiet(like):
        numbers = library.to_list(xp.concat([xp.reshape(array, (-1,)) for array in arrays], axis=0))
    rest = iter(numbers)

    def as_lists(array: Array) -> list[Any]:
        if array.ndim == 1:
            return list(itertools.islice(rest, array.shape[0]))
        return [list(itertools.islice(rest, array.shape[1])) for _ in range(array.shape[0])]

    return tuple(as_lists(value) if is_array(value) else value for value in values)


def _is_readable(array: Array, first: Array, like: Array) -> bool:
    is_alike = library_of(array) is library_of(like) and device_of(array) == device_of(like)
    return (
        is_alike
        and array.ndim in (1, 2)
        and not is_traced(array)
        and is_integral(array)
        and array.dtype == first.dtype
    )


def same_length(function: str, named: Mapping[str, Sequence[object]]) -> None:
    """Check that all sequences have the same length."""
    if len({len(values) for values in named.values()}) > 1:
        rule = " and ".join(f"`{name}`" for name in named) + " must have the same length"
        raise ArgumentValueError(function, rule, {f"len({name})": len(x) for name, x in named.items()})


def one_a_sequence(function: str, name: str, count: int, sequences: int) -> None:
    """Check that cumulative lengths are those of all sequences of a cache."""
    if count != sequences + 1:
        rule = f"`{name}` must have N + 1 integers for the N sequences of the cache"
        raise ArgumentValueError(function, rule, {f"len({name})": count, "N": sequences})


def integer_list(function: str, name: str, value: object, least: int = 0, most: float = LARGEST) -> list[int]:
    """Check integers from `least` to `most`, and return them as a list."""
    numbers = _to_list(function, name, value)
    return [integer(function, f"{name}[{index}]", number, least, most) for index, number in enumerate(numbers)]


def integers_or_rows(function: str, name: str, value: object) -> list[Any]:
    """Check integers, or rows of them, and return them as lists."""
    items = _to_list(function, name, value)
    if any(isinstance(item, list | tuple | range) or is_array(item) for item in items):
        return [integer_list(function, f"{name}[{n}]", row, least=-LARGEST) for n, row in enumerate(items)]
    return integer_list(function, name, items, least=-LARGEST)


def integer_table(function: str, name: str, value: object) -> list[list[int]]:
    """Check rows of integers, and return them as lists. -1 is allowed: it stands for no block."""
    rows = enumerate(_to_list(function, name, value))
    return [integer_list(function, f"{name}[{index}]", row, least=-1) for index, row in rows]


def integer_rows(function: str, name: str, value: Sequence[object]) -> list[list[int]]:
    """Check rows of integers, all of one length, and return them as lists."""
    rows = [integer_list(function, f"{name}[{n}]", row, least=-LARGEST) for n, row in enumerate(value)]
    lengths = [len(row) for row in rows]
    if len({*lengths}) > 1:
        raise ArgumentValueError(function, f"the rows of `{name}` must have one length", {"lengths": lengths})
    return rows


def _to_list(function: str, name: str, value: object) -> list[Any]:
    if isinstance(value, list | tuple | range):
        return list(value)
    if not is_array(value) or value.ndim == 0:
        rule = f"`{name}` must be a list or an integer array"
        raise ArgumentTypeError(function, rule, {name: repr(value)})
    plain_array(function, name, value)
    if is_traced(value):
        rule = f"`{name}` must be static inside a jit or a lazy graph, since shapes follow from it"
        raise ArgumentTypeError(
            function, rule, {name: f"a traced array {value.shape}"}, "Pass a tuple of ints."
        )
    if not is_integral(value):
        rule = f"`{name}` must hold integers"
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": value.dtype})
    items: list[Any] = library_of(value).to_list(value)
    return items
