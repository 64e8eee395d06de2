"""Checks of integers: one for each batch entry or token, and lists from which shapes follow.

Lists are read when they are checked, so inside a jit an array of them must be static.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from .._libraries import computing, dtype_name, has_override, is_array, library_of
from .._libraries.protocols import AnyArray, Array, Device, Dtype, Namespace, Shape
from ..errors import ArgumentTypeError, ArgumentValueError, summary
from . import has_values, shown
from .arrays import BOUNDS, broadcast, check_known, check_plain_array
from .keywords import LARGEST_INTEGER, check_choice, check_integer

IntegersLike: TypeAlias = int | Sequence[int] | AnyArray
"""One integer or several; an array has an integer dtype."""


class NumberStore(Protocol):
    """How numbers get to a device, and back: the grid of a call."""

    def put(self, numbers: Sequence[float], dtype: Dtype) -> Array:
        """Return a list of numbers as an array."""

    def bounds(self, integers: Array) -> Sequence[int] | None:
        """Return the least and the most of an array; None if they are not known yet."""


class Integers(NamedTuple):
    """Integers with their smallest and largest value, which are infinite if the values cannot be read."""

    values: int | Array
    least: float
    most: float

    def with_values(self, values: Any) -> Integers:
        """Return other integers with their least and most, so that tiles are skipped."""
        if not is_array(values):
            return self._replace(values=values)
        return Integers(values, *(library_of(values).bounds(values) or (-math.inf, math.inf)))

    def plus(self, number: int) -> Integers:
        """Return the integers with `number` added to each."""
        return Integers(self.values + number, self.least + number, self.most + number)


def check_integers(
    function: str,
    name: str,
    value: object,
    xp: Namespace,
    device: Device,
    *,
    traced: bool = False,
    least: int = -LARGEST_INTEGER,
    store: NumberStore | None = None,
) -> Integers:
    """Return `value` as int32. If its values can be read, check that each is at least `least`.

    With `traced` they count as values that cannot be read.
    """
    if isinstance(value, list | tuple):
        checked = [check_integer(function, f"{name}[{index}]", item, least) for index, item in enumerate(value)]
        put = partial(xp.asarray, device=device) if store is None else store.put
        array = put(checked, dtype=xp.int32)
        return Integers(array, min(checked or [0]), max(checked or [0]))  # torch.compile traces no `default`
    if not is_array(value):
        number = check_integer(function, name, value, least)
        return Integers(number, number, number)
    is_uint64 = dtype_name(value.dtype) == "uint64"
    value = _signed(function, name, value)
    bounds_of = library_of(value).bounds if store is None else store.bounds
    bounds = None if traced else bounds_of(value)
    smallest, largest = -math.inf, math.inf
    if bounds is not None:
        smallest, largest = bounds
        # A uint64 beyond int64 wraps around to a negative number: the message shows what was passed.
        for number in (smallest + 2**64 if is_uint64 and smallest < 0 else smallest, largest):
            check_integer(function, name, number, least)
    # Only now: a number beyond int32 would wrap around and pass the checks.
    return Integers(xp.astype(value, xp.int32, copy=False), smallest, largest)


def check_within(function: str, name: str, lengths: Integers, limit: int, letter: str) -> None:
    """Check that no length exceeds its axis, if both can be read. A graph has axes that only a run knows."""
    if isinstance(limit, int) and limit < lengths.most < math.inf:
        rule = f"`{name}` must be at most {letter}"
        raise ArgumentValueError(function, rule, {name: int(lengths.most), letter: limit})


def exceeds(function: str, name: str, length: int, limit: int) -> bool:
    """Return whether a length exceeds a limit; a compiler that knows it by a symbol alone may not know that."""
    try:
        return length > limit
    except Exception as error:  # JAX has a class of its own for it
        rule = f"`{name}` must have room for each length that a symbol stands for"
        raise ArgumentValueError(function, rule, {"its error": summary(error)}, BOUNDS) from error


def check_ids(
    function: str, name: str, value: object, xp: Namespace, device: Device, store: NumberStore | None = None
) -> Array:
    """Return integers that are only compared; an array keeps its width, and so its values."""
    if is_array(value):
        return _signed(function, name, value)
    values = check_integers(function, name, value, xp, device, store=store).values
    return xp.asarray(values, dtype=xp.int32, device=device) if isinstance(values, int) else values


def check_one_each(function: str, name: str, shape: Shape, target: Shape, letter: str, hint: str = "") -> None:
    """Check that `shape` has the last axis of `target`, and that its other axes broadcast to `target`."""
    check_known(function, name, shape)
    if not shape or shape[-1] != target[-1] or broadcast(shape, target) != target:
        rule = f"`{name}` must have one integer for each token, (..., {letter})"
        got = {f"{name}.shape": shape, f"(..., {letter})": target}
        raise ArgumentValueError(function, rule, got, hint)


def is_integral(array: AnyArray) -> bool:
    return dtype_name(array.dtype).startswith(("int", "uint"))


def _signed(function: str, name: str, array: Array) -> Array:
    """Return integers in a signed dtype, because libraries lack functions for unsigned dtypes.

    64-bit numbers that do not fit wrap around to negative numbers, which stay distinct.
    """
    if not is_integral(array):
        raise ArgumentTypeError(function, f"`{name}` must hold integers", {f"{name}.dtype": array.dtype})
    library = library_of(array)
    array = library.base_form(array)
    if not dtype_name(array.dtype).startswith("uint"):
        return array
    xp = library.namespace(array)
    has_int64 = library.has_dtype(function, xp, library.device(array), "int64")
    dtype = getattr(xp, "int64" if has_int64 else "int32", None)
    if dtype is None:
        rule = f"`{name}` must hold signed integers, because its library has no int64 to convert them to"
        hint = "Pass signed integers, such as int32."
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": array.dtype}, hint)
    return xp.astype(array, dtype)


def as_lists(value: Any) -> Any:
    """Return an array whose elements can be read now as nested lists; any other value unchanged."""
    return library_of(value).to_list(value) if is_array(value) and has_values(value) else value


def frozen(value: Any) -> Any:
    """Return a list as a tuple, an array as a copy and a NumPy integer as an int: their owner is immutable."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if is_array(value) and not has_override(value):  # a spec of the exporter holds no elements
        return library_of(value).frozen(value)
    return tuple(value) if isinstance(value, list | range) else value


def frozen_integers(function: str, **values: Any) -> list[Any]:
    """Return integers as `frozen` does. Flags are refused where they are written; a call checks the rest."""
    for name, value in values.items():
        items = value if isinstance(value, list | tuple) else [value]
        kinds = {type(item).__name__ for item in items}
        if hasattr(value, "__getitem__"):  # a spec of the exporter has no elements
            kinds |= {str(getattr(value, "dtype", ""))}
        if any("bool" in kind for kind in kinds):  # Python's, NumPy's, and the dtypes of all libraries
            rule = f"`{name}` must be an integer, or integers, but not booleans"
            raise ArgumentTypeError(function, rule, {name: shown(value)})
    return [*map(frozen, values.values())]


def check_offset(function: str, value: Any, otherwise: str = "integers, one per batch entry") -> Any:
    """Return an offset as `frozen` does; check the name of an alignment. Integers are checked by a call."""
    if isinstance(value, str):
        hint = "That is 'lower_right' here." if "right" in value.lower() else ""
        check_choice(function, "offset", value, ("lower_right",), otherwise, hint)
    return frozen_integers(function, offset=value)[0]


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
