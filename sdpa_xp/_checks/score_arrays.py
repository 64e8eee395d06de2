"""Checks of the arrays that meet the scores: masks, biases, and a scale or a position for each row."""

from __future__ import annotations

import sys
import warnings

from .._libraries import dtype_name, is_array, library_of, namespace_of
from .._libraries.protocols import Array, Dtype, Shape
from ..errors import PACKAGE, ArgumentTypeError, ArgumentValueError, Message
from . import cast_text, hint_for_name, shown
from .arrays import broadcast, check_floating, check_known

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
