"""The options of a call as text, numbers and arrays: all that a compiler can keep of an operation.

The text says what the options consist of, one thing on each line. Integers and numbers stand beside it, since a
compiler may know them by symbols alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from .._call.options import CallOptions
from .._libraries import dtype_name, is_array
from .._libraries.protocols import Array, Namespace
from .._tiles.modifier import ScoreModifier
from ..errors import PACKAGE


class Description(NamedTuple):
    """Options without their arrays."""

    text: str
    integers: Sequence[int]
    numbers: Sequence[float]


def describe(options: CallOptions) -> tuple[Description, list[Array]]:
    """Return the description of options, and their arrays. They hold no function and no class of a caller."""
    words: list[str] = []
    values: dict[str, list[Any]] = {"int": [], "float": [], "array": []}
    for option in options:
        _write(option, words, values)
    return Description("\n".join(words), values["int"], values["float"]), values["array"]


def options_of(description: Description, arrays: Sequence[Array], xp: Namespace) -> CallOptions:
    """Return the options of a description and of their arrays, whose dtypes are in `xp`."""
    words = iter(description.text.split("\n"))
    values = {"int": iter(description.integers), "float": iter(description.numbers), "array": iter(arrays)}

    def read() -> Any:
        kind, _, rest = next(words).partition(" ")
        if kind in values:
            return next(values[kind])
        if kind == "str":
            return rest
        if kind == "tuple":
            return tuple([read() for _ in range(int(rest))])
        if kind == "dtype":
            return getattr(xp, rest)
        if kind == "new":
            module, name, count = rest.split()
            modifier = getattr(import_module(f"{PACKAGE}.{module}"), name)
            return modifier(*[read() for _ in range(int(count))])
        return {"None": None, "True": True, "False": False}[kind]

    return CallOptions(*(read() for _ in CallOptions._fields))


def count_arrays(description: Description) -> int:
    """Return how many arrays the options hold."""
    return description.text.split("\n").count("array")


def _write(value: object, words: list[str], values: dict[str, list[Any]]) -> None:
    parts: Sequence[object] = ()
    if value is None or isinstance(value, bool):
        word = str(value)
    elif isinstance(value, str):
        word = f"str {value}"
    elif isinstance(value, int | float) or is_array(value):
        word = "int" if isinstance(value, int) else "float" if isinstance(value, float) else "array"
        values[word].append(value)
    elif isinstance(value, tuple):
        word, parts = f"tuple {len(value)}", value
    elif isinstance(value, ScoreModifier):
        module, parts = type(value).__module__, [argument for _, argument in value._fields()]
        word = f"new {module.removeprefix(PACKAGE)[1:]} {type(value).__name__} {len(parts)}"
    else:
        word = f"dtype {dtype_name(value)}"
    words.append(word)
    for part in parts:
        _write(part, words, values)
