"""Checks of numbers and of integers: one, or several in an array or a list."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from sdpa_xp._checks.keywords import check_choice
from sdpa_xp._checks.messages import type_name
from sdpa_xp._checks.shapes import broadcast, check_known
from sdpa_xp._libraries import has_override, is_array, is_traced, library_of
from sdpa_xp._libraries.base import LARGEST, dtype_name
from sdpa_xp._libraries.protocols import AnyArray, Array, Device, Dtype, Namespace, Shape
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

IntegersLike: TypeAlias = int | Sequence[int] | AnyArray
"""Integers as a caller passes them: an int, a list, or an array of an integer dtype."""
LARGEST_INTEGER = 2**29
"""The largest integer that is accepted. Indices are int32, which every library has, and sums of an index, an
offset and a width must fit."""


def check_number(function: str, name: str, value: object, dtype: Dtype = "float64") -> float:
    """Check a real number that is finite in `dtype` and does not underflow there, and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        rule = f"`{name}` must be a real number"
        raise ArgumentTypeError(function, rule, {name: f"{value!r} ({type_name(value)})"})
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    largest = LARGEST[dtype_name(dtype)]
    if not abs(result) <= largest:
        rule = f"`{name}` must be finite" + (f" in {dtype_name(dtype)}" if math.isfinite(result) else "")
        raise ArgumentValueError(function, rule, {name: result})
    if 0 < abs(result) < 1 / largest:  # it would lose its digits, or become 0
        rule = f"`{name}` must be 0 or at least {1 / largest:.1e} in size"
        raise ArgumentValueError(function, rule, {name: result})
    return result


def check_softcap(function: str, value: object, dtype: Dtype = "float64") -> float | None:
    """Check a positive number, and return it, or None if `value` is None or 0: the softcap is off."""
    cap = 0.0 if value is None else check_number(function, "softcap", value, dtype)
    if cap < 0:
        rule = "`softcap` must be positive, or None or 0 for off"
        raise ArgumentValueError(function, rule, {"softcap": value})
    return cap or None


def check_probability(function: str, name: str, value: object) -> float:
    """Check a number from 0 to 1, and return it."""
    result = check_number(function, name, value)
    if not 0 <= result <= 1:
        raise ArgumentValueError(function, f"`{name}` must be between 0 and 1", {name: value})
    return result


class DeviceNumbers(NamedTuple):
    """How numbers get to a device that has to be waited for, and back."""

    put: Callable[[Sequence[int]], Array]
    """Returns numbers as int32."""
    bounds: Callable[[Array], Sequence[int] | None]
    """Returns the least and the most of an array; None if they are not known yet."""


class Integers(NamedTuple):
    """Integers with their smallest and largest value, which are infinite if the values cannot be read."""

    values: int | Array
    least: float
    most: float

    def plus(self, number: int) -> Integers:
        """Return the integers with `number` added to each."""
        return Integers(self.values + number, self.least + number, self.most + number)

    @property
    def shape(self) -> Shape:
        return () if isinstance(self.values, int) else self.values.shape


def check_integer(
    function: str,
    name: str,
    value: object,
    least: int = -LARGEST_INTEGER,
    most: float = LARGEST_INTEGER,
    hint: str = "",
) -> int:
    """Check an integer of Python or NumPy from `least` to `most`, and return it as an int.

    `hint` says what to pass if it is less or more.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):  # True is an Integral
        rule = f"`{name}` must be an integer"
        how = ""
        if is_array(value):
            how = "Inside a jit it has to be static." if is_traced(value) else "Convert it with `int`."
        raise ArgumentTypeError(function, rule, {name: _shown(value)}, how)
    number = int(value)
    if not least <= number <= most:
        rule = f"`{name}` must be " + (f"at least {least}" if number < least else f"at most {most}")
        raise ArgumentValueError(function, rule, {name: number}, hint)
    return number


def check_rows(function: str, name: str, value: object, length: int) -> range:
    """Check a range of queries; None is all of them."""
    if value is None:
        return range(length)
    if not isinstance(value, range) or value.step != 1:
        raise ArgumentTypeError(function, f"`{name}` must be a range with step 1", {name: repr(value)})
    if not 0 <= value.start <= value.stop <= length:
        rule = f"`{name}` must be among the {length} queries (L)"
        raise ArgumentValueError(function, rule, {name: value})
    return value


def check_integers(
    function: str,
    name: str,
    value: object,
    xp: Namespace,
    device: Device,
    *,
    traced: bool,
    least: int = -LARGEST_INTEGER,
    waiting: DeviceNumbers | None = None,
) -> Integers:
    """Return `value` as int32. If its values can be read, check that each is at least `least`.

    `waiting` is for a device that has to be waited for.
    """
    if isinstance(value, list | tuple):
        checked = [check_integer(function, f"{name}[{index}]", item, least) for index, item in enumerate(value)]
        array = xp.asarray(checked, dtype=xp.int32, device=device) if waiting is None else waiting.put(checked)
        return Integers(array, min(checked, default=0), max(checked, default=0))
    if not is_array(value):
        number = check_integer(function, name, value, least)
        return Integers(number, number, number)
    is_uint64 = dtype_name(value.dtype) == "uint64"
    value = _signed(function, name, value)
    if traced or 0 in value.shape:
        return Integers(xp.astype(value, xp.int32, copy=False), -math.inf, math.inf)
    bounds = (int(xp.min(value)), int(xp.max(value))) if waiting is None else waiting.bounds(value)
    if bounds is None:
        return Integers(xp.astype(value, xp.int32, copy=False), -math.inf, math.inf)
    smallest, largest = bounds
    # A uint64 beyond int64 wraps around to a negative number: the message shows what was passed.
    for number in (smallest + 2**64 if is_uint64 and smallest < 0 else smallest, largest):
        check_integer(function, name, number, least)
    return Integers(xp.astype(value, xp.int32, copy=False), smallest, largest)


def check_within(function: str, name: str, lengths: Integers, limit: int, letter: str) -> None:
    """Check that no length exceeds its axis, if both can be read. A graph has axes that only a run knows."""
    if isinstance(limit, int) and limit < lengths.most < math.inf:
        rule = f"`{name}` must be at most {letter}"
        raise ArgumentValueError(function, rule, {name: int(lengths.most), letter: limit})


def check_ids(
    function: str,
    name: str,
    value: object,
    xp: Namespace,
    device: Device,
    waiting: DeviceNumbers | None = None,
) -> Array:
    """Return integers that are only compared; an array keeps its width, and so its values."""
    if is_array(value):
        return _signed(function, name, value)
    values = check_integers(function, name, value, xp, device, traced=True, waiting=waiting).values
    return xp.asarray(values, dtype=xp.int32, device=device) if isinstance(values, int) else values


def check_one_each(function: str, name: str, shape: Shape, target: Shape, letter: str, hint: str = "") -> None:
    """Check that `shape` has the last axis of `target`, and that its other axes broadcast to `target`."""
    check_known(function, name, shape)
    if not shape or shape[-1] != target[-1] or broadcast(shape, target) != target:
        rule = f"`{name}` must have one integer for each token, (..., {letter})"
        got = {f"{name}.shape": shape, f"(..., {letter})": target}
        raise ArgumentValueError(function, rule, got, hint)


def is_integral(array: AnyArray) -> bool:
    """Return whether an array holds integers."""
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


def frozen(value: Any) -> Any:
    """Return a list as a tuple, an array as a copy and a NumPy integer as an int: their owner is immutable."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if is_array(value) and not has_override(value):  # a spec of the exporter holds no elements
        return library_of(value).frozen(value)
    return tuple(value) if isinstance(value, list | range) else value


def check_offset(function: str, value: Any, otherwise: str = "integers, one per batch entry") -> Any:
    """Return an offset as `frozen` does; check the name of an alignment. Integers are checked by a call."""
    if isinstance(value, str):
        hint = "That is 'lower_right' here." if "right" in value.lower() else ""
        check_choice(function, "offset", value, ("lower_right",), otherwise, hint)
    return frozen(value)


def _shown(value: object) -> str:
    return type_name(value) if is_array(value) else f"{value!r} ({type_name(value)})"
