"""The options of a call as text, numbers and arrays: all that a compiler can keep of an operation.

The text says what the options consist of, one thing on each line. Integers and numbers stand beside it, since a
compiler may know them by symbols alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, NamedTuple

from .._libraries import dtype_name, is_array
from .._libraries.protocols import Array, Namespace
from .._tiles.modifier import ScoreModifier
from ..errors import PACKAGE
from .options import CallOptions


class Description(NamedTuple):
    """Options without their arrays."""

    text: str
    integers: Sequence[int]
    numbers: Sequence[float]


def describe(options: CallOptions) -> tuple[Description, list[Array]]:
    """Return the description of options, and their arrays. They hold no function and no class of a caller."""
    words: list[str] = []
    integers: list[int] = []
    numbers: list[float] = []
    arrays: list[Array] = []
    for option in options:
        _write(option, words, integers, numbers, arrays)
    return Description("\n".join(words), integers, numbers), arrays


def restore(description: Description, arrays: Sequence[Array], xp: Namespace) -> CallOptions:
    """Return the options of a description and of their arrays, whose dtypes are in `xp`."""
    reader = _OptionReader(description, arrays, xp)
    return CallOptions(*(reader.read() for _ in CallOptions._fields))


def count_arrays(description: Description) -> int:
    """Return how many arrays the options hold."""
    return description.text.split("\n").count("array")


def _write(
    value: object, words: list[str], integers: list[int], numbers: list[float], arrays: list[Array]
) -> None:
    parts: Sequence[object] = ()
    if value is None or isinstance(value, bool):
        words.append(str(value))
    elif isinstance(value, str):
        words.append(f"str {value}")
    elif isinstance(value, int):
        words.append("int")
        integers.append(value)
    elif isinstance(value, float):
        words.append("float")
        numbers.append(value)
    elif isinstance(value, tuple):
        words.append(f"tuple {len(value)}")
        parts = value
    elif isinstance(value, ScoreModifier):
        parts = [getattr(value, field.name) for field in fields(value) if field.init]
        words.append(
            f"new {type(value).__module__.removeprefix(PACKAGE)[1:]} {type(value).__name__} {len(parts)}"
        )
    elif is_array(value):
        words.append("array")
        arrays.append(value)
    else:
        words.append(f"dtype {dtype_name(value)}")
    for part in parts:
        _write(part, words, integers, numbers, arrays)


class _OptionReader:
    def __init__(self, description: Description, arrays: Sequence[Array], xp: Namespace) -> None:
        self.xp = xp
        self.words = iter(description.text.split("\n"))
        self.values: dict[str, Iterator[Any]] = {
            "int": iter(description.integers),
            "float": iter(description.numbers),
            "array": iter(arrays),
        }

    def read(self) -> Any:
        kind, _, rest = next(self.words).partition(" ")
        if kind in self.values:
            return next(self.values[kind])
        if kind == "str":
            return rest
        if kind == "tuple":
            return tuple([self.read() for _ in range(int(rest))])
        if kind == "dtype":
            return getattr(self.xp, rest)
        if kind == "new":
            module, name, count = rest.split()
            return getattr(import_module(f"{PACKAGE}.{module}"), name)(
                *[self.read() for _ in range(int(count))]
            )
        return {"None": None, "True": True, "False": False}[kind]
