"""How values appear in messages and in a repr."""

from __future__ import annotations

import reprlib
from dataclasses import fields
from typing import TYPE_CHECKING

from sdpa_xp._libraries import has_override, is_array, is_traced, library_of
from sdpa_xp._libraries.base import dtype_name
from sdpa_xp._libraries.protocols import Array

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WRITTEN = (bool, int, float, complex, str)
MOST_SHOWN = 8
"""Arrays and tuples with more elements than this are not written out."""


def install_hint(extras: str) -> str:
    """Return how to install extras of the package: from its source folder, since no package index has it."""
    return f"In the source folder of sdpa_xp, run: pip install '.[{extras}]'"


def type_name(value: object) -> str:
    """Return the type of a value with its module, such as numpy.ndarray; Python's own types have none."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def shown(value: object) -> str:
    """Return a value of Python's own types as it is written, if that is short, and any other by its type."""
    items = value if isinstance(value, list | tuple | set | frozenset | dict) else [value]
    if not all(item is None or type(item) in _WRITTEN for item in items):
        return f"a {type_name(value)} of length {len(items)}" if items is value else type_name(value)
    return reprlib.repr(value)


def brief(value: object) -> str:
    """Return a value for a repr: a short array by its elements, a longer array by its dtype and shape."""
    if isinstance(value, tuple) and len(value) > MOST_SHOWN:
        return f"<{len(value)} numbers>"
    if not is_array(value):
        return getattr(value, "__qualname__", None) or repr(value)
    if value.ndim == 1 and _is_readable(value) and value.shape[0] <= MOST_SHOWN:
        return "[" + ", ".join(f"{float(number):g}" for number in library_of(value).to_list(value)) + "]"
    return f"<{dtype_name(value.dtype)} {tuple(value.shape)}>"


def _is_readable(array: Array) -> bool:
    """Return whether elements can be read: a spec has none, and values of a graph have none yet."""
    return hasattr(array, "__getitem__") and not has_override(array) and not is_traced(array)


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
