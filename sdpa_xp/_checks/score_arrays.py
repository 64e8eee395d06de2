"""Checks of what meets the scores: arrays of masks and biases, and integers for each batch entry or token."""

from __future__ import annotations

import math
import numbers
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from .._libraries import dtype_name, has_override, is_array, library_of, namespace_of
from .._libraries.protocols import AnyArray, Array, Device, Dtype, Namespace, Shape
from ..errors import PACKAGE, ArgumentTypeError, ArgumentValueError, Message
from . import cast_text, hint_for_name, shown
from .arrays import broadcast, check_floating, check_known
from .keywords import LARGEST_INTEGER, check_choice, check_integer

ONE_A_ROW = "(..., Hq, L, 1)"
THE_BATCH = "the batch (...)"
WITHOUT_VALUE = ("attention_weights", "attention_scores")
WITHOUT_BATCH = (
    "Inputs of three axes are (heads, length, width). If the first axis is a batch, give them one head: "
)


def check_broadcasts(
    function: str, name: str, shape: Shape, target: Shape, letters: str, otherwise: str = ""
) -> None:
    """Check that an array of `shape` broadcasts to `target` without making it larger.

    `otherwise` is the hint if the shapes suggest no other.
    """
    check_known(function, name, shape)
    if broadcast(shape, target) != target:
        rule = f"`{name}` must broadcast to {letters}"
        hint = otherwise
        if len(target) == 4 and shape == (target[0], target[-1]):
            hint = f"A mask with one row per batch entry has the shape (B, 1, 1, S): {name}[:, None, None, :]."
        elif letters == ONE_A_ROW:
            hint = _row_hint(name, shape, target)
        elif len(target) == 3 and shape == (target[0], target[-1]):
            hint = f"{WITHOUT_BATCH}query[:, None, :, :], and the mask {name}[:, None, None, :]."
        elif letters == THE_BATCH and not target and function in ("to_array", "plot.mask"):
            hint = f"Pass a `shape` with the batch: {(*shape, 1, 'L', 'S')}.".replace("'", "")
        elif letters == THE_BATCH and not target:
            hint = f"{WITHOUT_BATCH}query[:, None, :, :], and so on."
        elif function in WITHOUT_VALUE and name == "attn_mask":
            hint = f"{function} takes no value: its third argument is `attn_mask`."
        elif name.endswith("lengths") and shape[:-1] and broadcast(shape[:-1], target) == target:
            hint = f"Pass one integer for each batch entry: {name}.sum(axis=-1) counts the 1s of a mask."
        elif len(target) > (1 if letters == THE_BATCH else 4) and shape[:1] == target[:1]:
            hint = "If you called a layer: it takes (batch, length, width), without an axis of heads."
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape, letters: target}, hint)


def _row_hint(name: str, shape: Shape, target: Shape) -> str:
    """Return how to index an array so that it broadcasts to (..., Hq, L, 1), or ""."""
    for letters, first in (("Hq", -3), ("L", -2), ("Hq and L", -3), ("B", -4), ("B and Hq", -4)):
        last = first + len(shape)
        count = 1 + letters.count("and")
        if len(shape) == count and len(target) >= -first and shape == target[first:last]:
            index = ", ".join([":"] * count + ["None"] * -last)
            return f"One for each {letters} has the shape {(*shape, *[1] * -last)}: {name}[{index}]."
    return ""


def check_broadcasts_to_sequences(
    function: str, name: str, shape: Shape, target: Shape, *, packed: bool
) -> None:
    """Check that an array broadcasts to the scores of a sequence of a ragged batch, (N, Hq, L, S).

    Sequences may have different S, and packed ones different L, so the message asks for a shape that fits all
    of them.
    """
    if broadcast(shape, target) != target:
        letters = "(N, Hq, 1, 1)" if packed else "(N, Hq, L, 1)"
        differ = "L and S" if packed else "S"
        rule = f"`{name}` must broadcast to {letters}, since sequences may have different {differ}"
        module = "biases" if name == "bias" else "masks"
        hint = f"`{module}.from_function` takes a function of the query and the key of any sequence."
        sizes = (*target[:-2], 1, 1) if packed else (*target[:-1], 1)
        raise ArgumentValueError(function, rule, {f"{name}.shape": shape, letters: sizes}, hint)


def check_columns(function: str, name: str, count: int, heads: int) -> None:
    """Check that there is one item for each query head."""
    if count != heads:
        rule = f"`{name}` must have as many heads as `query` (Hq)"
        raise ArgumentValueError(function, rule, {f"heads of {name}": count, "Hq": heads})


def check_added_dtype(function: str, name: str, array: Array, query: Dtype, accumulation: Dtype) -> None:
    """Check that an array that joins the scores converts exactly: see `joins_scores`."""
    check_floating(function, name, array)
    if not joins_scores(*map(dtype_name, (array.dtype, query, accumulation))):
        rule = f"`{name}` must have the dtype of `query` or of the scores ({dtype_name(accumulation)})"
        got = {f"{name}.dtype": array.dtype, "query.dtype": query}
        cast = cast_text(array, name, "query.dtype")
        hint = f"A narrower dtype is converted. Convert this one yourself: {cast}."
        if name == "attn_mask":  # converted 0 and 1 would be added to the scores, and mask nothing
            hint += " If its 1 means may attend, pass `attn_mask != 0`."
        raise ArgumentTypeError(function, rule, got, hint)


def joins_scores(dtype: str, query: str, accumulation: str) -> bool:
    """Return whether a floating dtype is that of the query or of the scores, or a narrower one."""
    if dtype in (query, accumulation, "float32"):  # scores are float32 or float64
        return dtype != "float64" or accumulation == "float64"
    # Of the two halves none is narrower: float16 has the smaller range, and bfloat16 fewer digits.
    return dtype in ("float16", "bfloat16") and query in ("float32", "float64")


def check_operand(function: str, name: str, value: object, rule: str) -> None:
    """Check that `value`, which is no mask or bias, is an array."""
    if not is_array(value):
        hint = hint_for_name(name, value)
        if callable(value):
            hint = "`from_function` takes a function of the indices."
        raise ArgumentTypeError(function, f"`{name}` must be {rule}", {name: shown(value)}, hint)


def check_mask_dtype(function: str, mask: Array) -> bool:
    """Check that `attn_mask` is boolean or floating, and return whether it is boolean."""
    name = dtype_name(mask.dtype)
    if name.startswith(("int", "uint")):
        rule = "`attn_mask` must be boolean (True = may attend) or floating (added to the scores)"
        got = {"attn_mask.dtype": mask.dtype}
        raise ArgumentTypeError(function, rule, got, _boolean_hint("attn_mask", mask))
    return name.startswith("bool")


def warn_if_zeros_and_ones(function: str, mask: Array) -> None:
    """Warn if a floating `attn_mask` has only 0 and 1. It masks nothing, and most likely should be boolean."""
    values = library_of(mask).values_at_hand(mask)
    if values is None:
        return
    xp, parts = namespace_of(values), [values]
    if 0 not in mask.shape and mask.ndim > 1:  # for most masks one row is enough
        parts.insert(0, values[..., :1, : min(64, mask.shape[-1])])
    for part in parts:
        # `==` would be a bool to type checkers: the protocol of arrays has no comparison that returns an array.
        is_zero, is_one = (part >= 0) & (part <= 0), (part >= 1) & (part <= 1)
        if not bool(xp.all(is_zero | is_one)):
            return
    if bool(xp.any(is_zero)) and bool(xp.any(is_one)):
        rule = "`attn_mask` must be boolean to mask: its 0 and 1 are added to the scores"
        hint = "Pass `attn_mask != 0` if 1 means that a query may attend, or pass the array as `bias`."
        got = {"attn_mask.dtype": mask.dtype}
        warnings.warn(Message(function, rule, got, hint), stacklevel=_caller_level())


def _caller_level() -> int:
    """Return the `stacklevel` of the code that called this library, or the exporter."""
    # From Python 3.12 on, `skip_file_prefixes` of `warnings.warn` does this.
    frame, level = sys._getframe(1), 1
    ours = (f"{PACKAGE}.", f"{PACKAGE}_export.")
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(ours):
        frame, level = frame.f_back, level + 1
    return level


def check_boolean(function: str, name: str, array: Array) -> None:
    if not dtype_name(array.dtype).startswith("bool"):
        rule = f"`{name}` must be boolean (True = may attend)"
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": array.dtype}, _boolean_hint(name, array))


def _boolean_hint(name: str, array: Array) -> str:
    if not dtype_name(array.dtype).startswith(("int", "uint")):
        return ""
    return f"An integer mask is ambiguous: pass `{name} != 0` if 1 means may attend, `== 0` if 0 does."


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
