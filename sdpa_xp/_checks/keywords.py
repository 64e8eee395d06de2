"""Checks of keywords that are no arrays: flags, numbers, names, functions, generators."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Sequence
from typing import Literal, NoReturn, TypeAlias

from sdpa_xp._checks.messages import shown, type_name
from sdpa_xp._checks.shapes import LAYOUTS
from sdpa_xp._libraries import LARGEST, Library, dtype_name, is_compiling
from sdpa_xp._libraries.protocols import Device, Dtype, Namespace
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError

Implementation: TypeAlias = Literal["xp", "native"]
"""The portable implementation in array-API calls, or a kernel of the arrays' own library."""


def flag(function: str, name: str, value: object) -> bool:
    """Check a bool of Python or NumPy, and return it as a bool."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise ArgumentTypeError(function, f"`{name}` must be True or False", {name: repr(value)})


def number(function: str, name: str, value: object, dtype: Dtype = "float64") -> float:
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
    if 0 < abs(result) < 1 / largest:
        rule = f"`{name}` must be 0 or at least {1 / largest:.1e} in size"
        raise ArgumentValueError(function, rule, {name: result})
    return result


def scale(function: str, value: object, dtype: Dtype) -> float | None:
    """Check a number, or None for the default, and return it."""
    return None if value is None else number(function, "scale", value, dtype)


def softcap(function: str, value: object, dtype: Dtype = "float64") -> float | None:
    """Check a positive number, and return it, or None if `value` is None or 0: the softcap is off."""
    cap = 0.0 if value is None else number(function, "softcap", value, dtype)
    if cap < 0:
        rule = "`softcap` must be positive, or None or 0 for off"
        raise ArgumentValueError(function, rule, {"softcap": value})
    return cap or None


def implementation(function: str, value: object, *, kernels: bool) -> Implementation | None:
    """Check for None, "xp", or "native" if vendors have `kernels` for the function."""
    if value is None:
        return None
    if isinstance(value, str) and value == "xp":
        return "xp"
    if isinstance(value, str) and value == "native":
        if kernels:
            return "native"
        refuse_missing_kernel(function, "no vendor has a kernel for this function")
    rule = "`implementation` must be None or 'xp', the portable one" + ", or 'native'" * kernels
    raise ArgumentValueError(function, rule, {"implementation": repr(value)})


def refuse_missing_kernel(function: str, reason: str) -> NoReturn:
    """Refuse "native" if no kernel computes the call."""
    rule = f"`implementation` must be None or 'xp', because {reason}"
    raise ArgumentValueError(function, rule, {"implementation": "'native'"})


def refuse_missing_streams(function: str, library: str) -> NoReturn:
    """Refuse a function that a library of streamed chunks does not compute."""
    rule = f"arrays of {library} support attention, but neither weights nor gradients"
    hint = f"Arrays of Dask support both: dask.array.from_zarr reads what {library} writes."
    raise ArgumentTypeError(function, rule, {"query": f"an array of {library}"}, hint)


def named(
    function: str, name: str, value: object, choices: Sequence[str], otherwise: str = "", hint: str = ""
) -> None:
    """Check that `value` is one of the names in `choices`; `otherwise` says what else is allowed."""
    if not (isinstance(value, str) and value in choices):
        rule = f"`{name}` must be " + " or ".join(
            [repr(choice) for choice in choices] + [otherwise] * bool(otherwise)
        )
        raise ArgumentValueError(function, rule, {name: repr(value)}, hint)


def layout(function: str, value: object) -> None:
    """Check the name of a layout; those of other libraries, such as "bshd", get their name here."""
    if not (isinstance(value, str) and value in LAYOUTS):
        letters = value.lower() if isinstance(value, str) else ""
        length = max(map(letters.find, "lst"))
        # N is the heads of "bnsh" (ONNX), and the length of "nhd" (FlashInfer).
        heads = letters.find("n" if length >= 0 and "n" in letters else "h")
        length = letters.find("n") if length < 0 else length
        hint = f"That is {LAYOUTS[heads > length]!r} here." if min(heads, length) >= 0 else ""
        rule = f"`layout` must be {' or '.join(map(repr, LAYOUTS))}"
        raise ArgumentValueError(function, rule, {"layout": repr(value)}, hint)


def probability(function: str, name: str, value: object) -> float:
    """Check a number from 0 to 1, and return it."""
    result = number(function, name, value)
    if not 0 <= result <= 1:
        raise ArgumentValueError(function, f"`{name}` must be between 0 and 1", {name: value})
    return result


def softmax_dtype(
    function: str, value: object, default: Dtype, library: Library, xp: Namespace, device: Device
) -> Dtype:
    """Return the dtype of the scores: `default`, or the wider dtype that the caller chose."""
    if value is None:
        return default
    chosen, least = dtype_name(value), dtype_name(default)
    if chosen not in ("float32", "float64") or chosen < least:  # their names compare like their widths
        rule = "`softmax_dtype` must be None, or float32 or float64 and no narrower than the scores"
        hint = "A narrower one would only lose digits."
        raise ArgumentValueError(function, rule, {"softmax_dtype": chosen, "scores": least}, hint)
    if chosen not in library.real_dtypes(function, xp, device):
        rule = f"`softmax_dtype` must be one that {xp.__name__} has on this device"
        raise ArgumentValueError(function, rule, {"softmax_dtype": chosen, "device": device})
    return getattr(xp, chosen)


def lse_base(function: str, value: object) -> float | None:
    """Check the base of the logarithm, None for e or 2, and return it."""
    if value is None or (
        not isinstance(value, bool) and isinstance(value, numbers.Real) and value in (2, math.e)
    ):
        return None if value in (None, math.e) else 2.0
    raise ArgumentValueError(function, "`lse_base` must be None (e) or 2", {"lse_base": repr(value)})


def function(public_function: str, name: str, value: object, arguments: Sequence[str]) -> None:
    """Check that `value` is a function of these arguments, if its signature can be read.

    `public_function` is named in messages.
    """
    if not callable(value):
        raise ArgumentTypeError(public_function, f"`{name}` must be a function", {name: shown(value)})
    if is_compiling():  # torch.compile cannot trace `inspect`
        return
    try:
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # a builtin has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        rule = f"`{name}` must be a function of {len(arguments)} arguments ({', '.join(arguments)})"
        written = getattr(value, "__name__", type_name(value))
        raise ArgumentTypeError(public_function, rule, {name: f"{written}{signature}"}) from None


def rng(function: str, value: object, library: Library, *, needed: bool) -> None:
    """Check a generator of `library`. It may be None if none is `needed`."""
    name = library.rng_name
    if value is None and needed:
        hint = "Pass one, so that you can reproduce the result."
        raise ArgumentValueError(function, f"`dropout_p` > 0 needs `rng`, a {name}", {"rng": None}, hint)
    if value is not None and not library.is_rng(value):
        raise ArgumentTypeError(function, f"`rng` must be a {name}", {"rng": shown(value)})
    if value is not None and not library.can_draw():
        rule = "`rng` cannot be used inside torch.compile"
        hint = "torch.compile does not support torch.Generator: call this outside of the compiled function."
        raise ArgumentTypeError(function, rule, {"rng": name}, hint)
