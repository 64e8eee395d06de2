"""Checks of every array of a call: it is plain, and its library, device and dtype fit the others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import cast

from sdpa_xp._checks.messages import shown, type_name
from sdpa_xp._libraries import is_array, is_unknown, library_of, namespace_of
from sdpa_xp._libraries.base import FLOATING, dtype_name, has_standard_name
from sdpa_xp._libraries.protocols import Array, Dtype, Namespace, Shape
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message

_OTHER_KINDS = {"attn_mask": "a mask", "mask": "a mask", "bias": "a bias"}
"""What an argument may be instead of an array."""
_WORDS = "Words are not vectors: pass one row of numbers for each word."
_UNLIKE_ROWS = (
    "The rows have different lengths: pad them to one length, and mask the padding with masks.padding."
)


def check_one_library(function: str, values: Mapping[str, object]) -> tuple[Namespace, dict[str, Array]]:
    """Check that all values are plain arrays of one library, and return its namespace and the arrays."""
    arrays = {name: check_plain_array(function, name, value) for name, value in values.items()}
    namespaces = {name: _namespace(function, name, array) for name, array in arrays.items()}
    first, xp = next(iter(namespaces.items()))
    for name, namespace in namespaces.items():
        if namespace is not xp:
            rule = f"`{first}` and `{name}` must be arrays of one library"
            got = {first: type_name(arrays[first]), name: type_name(arrays[name])}
            raise ArgumentTypeError(function, rule, got, _conversion_hint(arrays, first, name))
    return xp, arrays


def _namespace(function: str, name: str, array: Array) -> Namespace:
    """Check that the array's method returns a namespace, and return it."""
    try:
        xp = namespace_of(array)
    except AttributeError as error:  # from array-api-compat 1.15 on
        if error.name != "__name__":
            raise
        xp = cast(Namespace, error.obj)
    if not hasattr(xp, "__name__"):
        rule = f"`{name}.__array_namespace__()` must return a namespace that has a `__name__`, such as a module"
        raise ArgumentTypeError(function, rule, {f"{name}.__array_namespace__()": xp})
    return xp


def explain_missing_name(function: str, xp: Namespace, error: AttributeError) -> None:
    """Check that no name is missing in the namespace: `error` is of something else."""
    if error.obj is xp:
        rule = f"the namespace of the arrays must have `{error.name}` for this call"
        hint = 'Define it there; the page "Add a backend" lists what each feature needs.'
        missing = Message(function, rule, {"namespace": xp.__name__}, hint)
        raise AttributeError(missing, name=error.name, obj=xp) from error


def _conversion_hint(arrays: Mapping[str, Array], *names: str) -> str:
    """Return how to make two arrays arrays of one library; lazy ones do not exchange memory."""
    fields = [name for name in names if name.endswith((".weight", ".bias"))]
    if fields and fields != [*names]:  # an array of a layer beside one of its call
        (passed,) = (name for name in names if name not in fields)
        return f"Move the layer to the library of `{passed}`: layer.to({passed})."
    for name, other in (names, names[::-1]):
        library = library_of(arrays[name])
        if other.startswith("cache."):  # a caller can convert the new tokens, but not what a cache holds
            continue
        # Other arrays may be read wrongly: torch.asarray takes one of JAX for its bytes.
        if library.conversion and library_of(arrays[other]).module == "numpy":
            return f"Convert one: {library.conversion}({other})."
    return "Convert one, for example with `from_dlpack`."


def check_plain_array(function: str, name: str, value: object) -> Array:
    """Check that `value` is an array with the arithmetic of the standard; return it without its subclass."""
    hint = library_of(value).unsupported_reason(value)
    if is_array(value) and not hint:
        return library_of(value).base_form(value)
    if callable(value) and name in ("attn_mask", "mask", "bias") and not hint:
        hint = "`masks.from_function` and `biases.from_function` take a function of the indices."
        module = str(getattr(value, "__module__", ""))
        if module.startswith(("sdpa_xp.masks", "sdpa_xp.biases")):
            kind = "a mask" if module.startswith("sdpa_xp.masks") else "a bias"
            hint = f"Call it: {getattr(value, '__name__', 'the function')}(...) returns {kind}."
    if isinstance(value, list | tuple) and not hint:
        hint = "" if name in _OTHER_KINDS else _hint_for_rows(value)
        hint = hint or f"Convert the list: numpy.asarray({name})."
    hint = hint or _named_hint(name, value)
    other = f"{_OTHER_KINDS[name]} or " if name in _OTHER_KINDS else ""
    rule = f"`{name}` must be {other}a plain array of a library that follows the array API standard"
    raise ArgumentTypeError(function, rule, {name: shown(value)}, hint)


def _hint_for_rows(rows: object) -> str:
    """Return why nested lists do not convert to an array of numbers; "" if they do."""
    if _has_words(rows):
        return _WORDS
    return _UNLIKE_ROWS if _shape_of(rows) is None else ""


def _has_words(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_words, value))
    return isinstance(value, str | bytes)


def _shape_of(value: object) -> Shape | None:
    """Return the shape of an array, a number or nested lists of them; None if the shapes of rows differ."""
    if not isinstance(value, list | tuple):
        return tuple(value.shape) if is_array(value) else ()
    shapes = [_shape_of(row) for row in value]
    if any(shape is None or shape != shapes[0] for shape in shapes):
        return None
    return (len(value), *(shapes[0] or ())) if shapes else (0,)


def _named_hint(name: str, value: object) -> str:
    """Return how to pass a mask or a bias that came by a name, or in the place of an array."""
    if isinstance(value, bool) and name in ("attn_mask", "mask"):
        return "Write is_causal=True for a causal mask, and nothing for none."
    if isinstance(value, str) and name in ("attn_mask", "mask"):
        return "`is_causal=True` and `masks.causal()` are the causal mask; `sdpa_xp.masks` has others."
    if isinstance(value, str) and name == "bias":
        return "`sdpa_xp.biases` has them, such as `biases.alibi(heads)`."
    for package, keyword in {"masks": "attn_mask", "biases": "bias"}.items():
        if type(value).__module__.startswith(f"sdpa_xp.{package}") and name not in _OTHER_KINDS:
            return f"Pass it by its keyword: {keyword}=..."
    if type(value).__module__.startswith("sdpa_xp.caches"):
        return f"Call a method of the cache: {name}.attend(query)."
    return ""


def check_one_device(function: str, arrays: Mapping[str, Array]) -> None:
    """Check that all arrays are on one device, as far as their library names one."""
    devices = {name: library_of(array).device(array) for name, array in arrays.items()}
    known = {name: device for name, device in devices.items() if device is not None}
    for name, device in known.items():
        first, reference = next(iter(known.items()))
        if device != reference:
            rule = f"`{first}` and `{name}` must be on one device"
            raise ArgumentValueError(function, rule, {f"{first}.device": reference, f"{name}.device": device})


def check_floating(function: str, name: str, array: Array) -> None:
    """Check that `array` has a supported real floating dtype."""
    if dtype_name(array.dtype) not in FLOATING:
        rule = f"`{name}` must be one of {', '.join(FLOATING)}"
        hint = f"Convert it first: {library_of(array).cast_text(name, 'float32')}."
        if is_unknown(array) and not has_standard_name(array.dtype):
            hint = "sdpa_xp reads no name of the standard in it: add the attribute `name`, such as 'float32'."
        if dtype_name(array.dtype).startswith("complex"):
            hint = f"Attention of complex numbers is not defined; xp.real({name}) and xp.imag({name}) are real."
        if getattr(array.dtype, "kind", "") in ("O", "S", "T", "U"):  # NumPy's objects, bytes and strings
            hint = _hint_for_rows(library_of(array).to_list(array)) or hint
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": array.dtype}, hint)


def check_one_dtype(function: str, arrays: Mapping[str, Array]) -> None:
    """Check that all arrays have the dtype of the first."""
    first, reference = next(iter(arrays.items()))
    for name, array in arrays.items():
        if array.dtype != reference.dtype:
            rule = f"`{first}` and `{name}` must have one dtype"
            got = {f"{first}.dtype": reference.dtype, f"{name}.dtype": array.dtype}
            code = library_of(array).cast_text
            hint = f"Convert one: {code(name, f'{first}.dtype')}."
            if name.endswith(".weight"):  # a caller of a layer can convert the input, but not the weight
                hint = f"Convert the input: {code(first, dtype_name(array.dtype))}."
            elif name.startswith("cache."):  # nor what a cache holds
                hint = f"Convert the new tokens: {code(first, f'{name}.dtype')}."
            raise ArgumentTypeError(function, rule, got, hint)


def check_one_kind(function: str, values: Mapping[str, object]) -> tuple[Namespace, dict[str, Array]]:
    """Check that all values are floating arrays of one library, dtype and device, and return both."""
    xp, arrays = check_one_library(function, values)
    for name, array in arrays.items():
        check_floating(function, name, array)
    check_one_dtype(function, arrays)
    check_one_device(function, arrays)
    return xp, arrays


def check_added_dtype(function: str, name: str, array: Array, query: Dtype, accumulation: Dtype) -> None:
    """Check that an array that joins the scores converts exactly: see `joins_scores`."""
    check_floating(function, name, array)
    if not joins_scores(*map(dtype_name, (array.dtype, query, accumulation))):
        rule = f"`{name}` must have the dtype of `query` or of the scores ({dtype_name(accumulation)})"
        got = {f"{name}.dtype": array.dtype, "query.dtype": query}
        cast = library_of(array).cast_text(name, "query.dtype")
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
        hint = (
            "`from_function` takes a function of the indices." if callable(value) else _named_hint(name, value)
        )
        raise ArgumentTypeError(function, f"`{name}` must be {rule}", {name: shown(value)}, hint)


def refuse_other_kind(function: str, name: str, value: object, refused: type, hint: str) -> None:
    """Check that a bias is not passed as a mask, or a mask as a bias; `refused` is the wrong type."""
    if isinstance(value, refused):
        rule = f"`{name}` must not be a {refused.__name__.lower()}"
        raise ArgumentTypeError(function, rule, {name: value}, hint)


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
    """Return the `stacklevel` of the code that called sdpa_xp."""
    # From Python 3.12 on, `skip_file_prefixes` of `warnings.warn` does this.
    frame, level = sys._getframe(1), 1
    ours = ("sdpa_xp", "sdpa_xp_export")
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    return level


def check_boolean(function: str, name: str, array: Array) -> None:
    """Check that `array` is boolean."""
    if not dtype_name(array.dtype).startswith("bool"):
        rule = f"`{name}` must be boolean (True = may attend)"
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": array.dtype}, _boolean_hint(name, array))


def _boolean_hint(name: str, array: Array) -> str:
    if not dtype_name(array.dtype).startswith(("int", "uint")):
        return ""
    return f"An integer mask is ambiguous: pass `{name} != 0` if 1 means may attend, `== 0` if 0 does."
