"""Attributes that are set or deleted in an object that never changes: what to write instead."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

from sdpa_xp._checks.messages import shown
from sdpa_xp.errors import Message


class Immutable:
    """The base class of frozen dataclasses with slots. Their own refusal fails on Python 3.11, in `super()`."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The second class that dataclass makes has slots, and its two methods, which mypy takes for `object`'s.
        if "__setattr__" in vars(cls):
            cls.__setattr__ = _refuse_to_set  # type: ignore[method-assign]
            cls.__delattr__ = _refuse_to_delete  # type: ignore[method-assign]


def _refuse_to_set(self: Any, name: str, value: object) -> None:
    if _is_of_subclass(self, name):
        object.__setattr__(self, name, value)
    else:
        raise FrozenInstanceError(_refusal(self, name, "set", {name: shown(value)}))


def _refuse_to_delete(self: Any, name: str) -> None:
    if _is_of_subclass(self, name):
        object.__delattr__(self, name)
    else:
        raise FrozenInstanceError(_refusal(self, name, "deleted", {"attribute": repr(name)}))


def _is_of_subclass(value: Any, name: str) -> bool:
    """Return whether a class that is no such dataclass, but derived from one, may set the attribute."""
    return vars(type(value)).get("__setattr__") is not _refuse_to_set and name not in _field_names(value)


def _refusal(value: Any, name: str, done: str, got: dict[str, str]) -> str:
    kind, names = type(value).__name__, _field_names(value)
    rule = f"`{name}` cannot be {done}, because instances of {kind} never change"
    hint = f"Write dataclasses.replace(x, {name}=...) for a changed copy of x."
    return Message(kind, rule, got, hint if name in names else f"Its fields are {', '.join(names)}.")


def _field_names(value: Any) -> list[str]:
    return [field.name for field in fields(value) if field.init]
