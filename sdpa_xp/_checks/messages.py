"""The form of every message, and how a value's type is named in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from sdpa_xp._libraries import dtype_name, is_array, is_traced
from sdpa_xp._libraries.overrides import override
from sdpa_xp._libraries.protocols import Array

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FEW = 8


def message(function: str, rule: str, got: Mapping[str, object], hint: str = "") -> str:
    """`function: what must hold; got name=value. hint`: the form of every error here."""
    seen = ", ".join(f"{name}={value}" for name, value in got.items())
    return f"{function}: {rule}; got {seen}." + (f" {hint}" if hint else "")


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def brief(value: object) -> str:
    """A value as a repr shows it: a short array by its elements, a longer one by its dtype and shape."""
    if isinstance(value, tuple) and len(value) > FEW:
        return f"<{len(value)} numbers>"
    if not is_array(value):
        return getattr(value, "__qualname__", None) or repr(value)
    if value.ndim == 1 and _is_seen(value) and value.shape[0] <= FEW:
        return "[" + ", ".join(f"{float(value[index]):g}" for index in range(value.shape[0])) + "]"
    return f"<{dtype_name(value.dtype)} {tuple(value.shape)}>"


def _is_seen(array: Array) -> bool:
    """Whether the elements can be looked at: a spec has none, and a value of a graph has none yet."""
    return hasattr(array, "__getitem__") and override(array) is None and not is_traced(array)


def call_of(value: DataclassInstance, name: str) -> str:
    """The call of `name` that makes `value`, without the arguments that have their defaults."""
    shown = [field for field in fields(value) if field.repr]
    given = {field.name: getattr(value, field.name) for field in shown}
    for field in shown:
        held = given[field.name]
        if type(held) is type(field.default) and held == field.default:
            del given[field.name]
    if [*given] == [shown[0].name]:
        return f"{name}({brief(given.popitem()[1])})"
    return f"{name}({', '.join(f'{key}={brief(held)}' for key, held in given.items())})"
