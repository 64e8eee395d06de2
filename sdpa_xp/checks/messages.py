"""The form of every message, and how a value's type is named in one."""

from __future__ import annotations

from collections.abc import Mapping


def message(function: str, rule: str, got: Mapping[str, object], hint: str = "") -> str:
    """`function: what must hold; got name=value. hint`: the form of every error here."""
    seen = ", ".join(f"{name}={value}" for name, value in got.items())
    return f"{function}: {rule}; got {seen}." + (f" {hint}" if hint else "")


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
