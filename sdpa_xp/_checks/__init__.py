"""Checks of arguments that several files need: arrays, shapes, numbers and keywords; and the words of messages.

Checks run before any work. `check_...` is named after what must hold, and `refuse_...` after what does not. It
raises an error that names the wrong argument, or returns the checked value. `function` is the public function
that was called, and `name` is the argument; messages begin with them. A check with one caller stands beside it.

Here are the words of messages: how values are shown, and what to pass instead of a wrong one. They also show in
the repr of masks, biases, layers and caches, and in their refusal to change.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from .._libraries import dtype_name, has_override, is_array, is_traced, library_of
from .._libraries.protocols import Array, Shape
from ..errors import PACKAGE, Message

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_WRITTEN = (bool, int, float, complex, str)
MOST_SHOWN = 8
"""Arrays and tuples with more elements than this are not written out."""
_OWN = tuple(f"{PACKAGE}.{name}" for name in ("masks", "biases", "caches", "positional"))
MOST_CHARACTERS = 100
"""In a message, a mask, a bias, a cache or a rotation with a longer repr is named by its type."""


def install_hint(extras: str) -> str:
    """Return how to install extras of the package: from its source folder, since no package index has it."""
    return f"In the source folder of sdpa_xp, run: pip install '.[{extras}]'"


def nearest_hint(name: object, names: Iterable[str], likeness: float = 0.61) -> str:
    """Return the one of `names` that is most like an unknown name, as a hint; "" if none is like it.

    Names with other digits are not alike: float8 is no slip for float64, but float3 may be one for float32.
    """
    digits = _digits(name)
    # "dask" is like "pandas" by 0.6.
    known = {one.lower(): one for one in names if digits.startswith(_digits(one)[: len(digits)])}
    near = get_close_matches(name.lower(), known, 1, likeness) if isinstance(name, str) else []
    return f"The nearest is {known[near[0]]!r}." if near else ""


def _digits(name: object) -> str:
    return "".join(filter(str.isdigit, str(name)))


def type_name(value: object) -> str:
    """Return the type of a value with its module, such as numpy.ndarray; Python's own types have none."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def shown(value: object) -> str:
    """Return a value of Python's own types, or such as a mask, as it is written, if that is short.

    Any other is named by its type.
    """
    if type(value).__module__.startswith(_OWN) and len(text := repr(value)) <= MOST_CHARACTERS:
        return text
    items = value if isinstance(value, list | tuple | set | frozenset | dict) else [value]
    if not all(item is None or type(item) in _WRITTEN for item in items):
        return f"a {type_name(value)} of length {len(items)}" if items is value else type_name(value)
    return reprlib.repr(value)


def brief(value: object) -> str:
    """Return a value for a repr: a short array by its elements, a longer array by its dtype and shape."""
    if isinstance(value, tuple) and (count := _count(value)) > MOST_SHOWN:
        return f"<{count} {'numbers' if count == len(value) else 'values'}>"
    if not is_array(value):
        return getattr(value, "__qualname__", None) or repr(value)
    if value.ndim == 1 and has_values(value) and value.shape[0] <= MOST_SHOWN:
        return "[" + ", ".join(f"{float(number):g}" for number in library_of(value).to_list(value)) + "]"
    return f"<{dtype_name(value.dtype)} {tuple(value.shape)}>"


def _count(value: object) -> int:
    """Return how many values a tuple has, those of tuples in it counted one by one."""
    return sum(map(_count, value)) if isinstance(value, tuple) else 1


def has_values(array: Any) -> bool:
    """Return whether elements can be read now: a spec of the exporter and values of a graph have none."""
    return not has_override(array) and hasattr(array, "__getitem__") and not is_traced(array)


def call_of(value: DataclassInstance, name: str) -> str:
    """Return the call of `name` that makes `value`, without the arguments that have their defaults."""
    parts = [field for field in fields(value) if field.repr]
    arguments = {field.name: getattr(value, field.name) for field in parts}
    for field in parts:
        argument = arguments[field.name]
        # Types first: an array has no single answer to `==`, and True is not the default 1.
        if type(argument) is type(field.default) and argument == field.default:
            del arguments[field.name]
    if [*arguments] == [parts[0].name]:  # a first argument alone needs no keyword
        return f"{name}({brief(arguments.popitem()[1])})"
    return f"{name}({', '.join(f'{key}={brief(argument)}' for key, argument in arguments.items())})"


OTHER_KINDS = {"attn_mask": "a mask", "mask": "a mask", "bias": "a bias"}
"""What an argument may be instead of an array."""
_WORDS = "Words are not vectors: pass one row of numbers for each word."
_UNLIKE_ROWS = (
    "The rows have different lengths: pad them to one length, and mask the padding with masks.padding."
)


def cast_text(array: Array, name: str, dtype: str) -> str:
    """Return the code that converts `array`, called `name`, to a dtype, such as float32 or query.dtype."""
    code, dtype_code = library_of(array).cast_code
    return code.format(array=name, dtype=dtype if "." in dtype else dtype_code.format(name=dtype))


def conversion_hint(arrays: Mapping[str, Array], *names: str) -> str:
    """Return how to make two arrays arrays of one library; lazy ones do not exchange memory."""
    of_layer = [name for name in names if name.endswith((".weight", ".bias"))]
    if of_layer and of_layer != [*names]:  # an array of a layer beside one of its call
        (passed,) = (name for name in names if name not in of_layer)
        return f"Move the layer to the library of `{passed}`: layer.to({passed})."
    for name, other in (names, names[::-1]):
        library = library_of(arrays[name])
        if other.startswith("cache."):  # a caller can convert the new tokens, but not what a cache holds
            continue
        # Other arrays may be read wrongly: torch.asarray takes one of JAX for its bytes.
        if library.conversion and library_of(arrays[other]).module == "numpy":
            return f"Convert one: {library.conversion}({other})."
    return "Convert one, for example with `from_dlpack`."


def hint_for_value(name: str, value: object) -> str:
    """Return what to pass instead of a value that is no array."""
    if callable(value) and name in OTHER_KINDS:
        module = str(getattr(value, "__module__", ""))
        if module.startswith(_OWN[:2]):
            kind = "a mask" if module.startswith(_OWN[0]) else "a bias"
            return f"Call it: {getattr(value, '__name__', 'the function')}(...) returns {kind}."
        return "`masks.from_function` and `biases.from_function` take a function of the indices."
    if isinstance(value, list | tuple):
        return ("" if name in OTHER_KINDS else rows_hint(value)) or f"Convert the list: numpy.asarray({name})."
    return hint_for_name(name, value)


def rows_hint(rows: object) -> str:
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


def hint_for_name(name: str, value: object) -> str:
    """Return how to pass a mask or a bias that came by a name, or in the place of an array."""
    if isinstance(value, bool) and name in ("attn_mask", "mask"):
        return "Write is_causal=True for a causal mask, and nothing for none."
    if isinstance(value, str) and name in ("attn_mask", "mask"):
        return "`is_causal=True` and `masks.causal()` are the causal mask; `sdpa_xp.masks` has others."
    if isinstance(value, str) and name == "bias":
        return "`sdpa_xp.biases` has them, such as `biases.alibi(heads)`."
    for package, keyword in {"masks": "attn_mask", "biases": "bias"}.items():
        if type(value).__module__.startswith(f"{PACKAGE}.{package}") and name not in OTHER_KINDS:
            return f"Pass it by its keyword: {keyword}=..."
    if type(value).__module__.startswith(_OWN[2]):
        return f"Call a method of the cache: {name}.attend(query)."
    return ""


class Immutable:
    """The base class of frozen dataclasses with slots. Their own refusal fails on Python 3.11, in `super()`."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The second class that dataclass makes has slots, and its own two methods.
        if "__setattr__" in vars(cls):
            cls.__setattr__ = _refuse_to_set  # type: ignore[method-assign]  # mypy takes both for `object`'s
            cls.__delattr__ = _refuse_to_delete  # type: ignore[method-assign]


def _refuse_to_set(self: Any, name: str, value: object) -> None:
    _check_may_change(self, name, "set", {name: shown(value)})
    object.__setattr__(self, name, value)


def _refuse_to_delete(self: Any, name: str) -> None:
    _check_may_change(self, name, "deleted", {"attribute": repr(name)})
    object.__delattr__(self, name)


def _check_may_change(value: Any, name: str, done: str, got: dict[str, str]) -> None:
    """Refuse a change, except of an attribute that a class derived from the dataclass has added."""
    kind, names = type(value).__name__, [field.name for field in fields(value) if field.init]
    if name in names or vars(type(value)).get("__setattr__") is _refuse_to_set:
        rule = f"`{name}` cannot be {done}, because instances of {kind} never change"
        hint = f"Write dataclasses.replace(x, {name}=...) for a changed copy of x."
        hint = hint if name in names else f"Its fields are {', '.join(names)}."
        raise FrozenInstanceError(Message(kind, rule, got, hint))
