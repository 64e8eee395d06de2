"""Whether a layer still holds what it held when its graph was written, which has the numbers of that moment.

A layer may be any callable. So arrays and numbers are looked for in attributes, lists and dictionaries; in the
closure of a function and in the globals that it names; in partials, methods and classes. Each place is compared
with what stood there. A number that is written into an array changes no place; some libraries count it.
"""

from __future__ import annotations

import functools
import numbers
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sdpa_xp_export._arrays.operators import is_array
from sdpa_xp_export._layer.held_arrays import LIBRARIES

MOST = 10_000
"""The most places. A layer that leads to more is connected with half of the program."""
_COMPARED = (numbers.Number, str, bytes)
"""Types of values that are the same if they are equal."""


@dataclass(slots=True)
class Watch:
    """The places that a layer leads to, each with what stood there."""

    items: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """A list or a dictionary, an index, and a value."""
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    """A cell of a closure or an object with slots, the name of an attribute, and its value."""
    versions: list[tuple[Any, int]] = field(default_factory=list)
    """An array that counts how often it was written to, and the count."""

    def is_same(self) -> bool:
        """Return whether each place has what stood there."""
        try:
            for owner, index, value in self.items:  # in each call of a layer, so nothing is made here
                if owner[index] is not value and not _are_equal(owner[index], value):
                    return False
            for owner, name, value in self.attributes:
                if getattr(owner, name) is not value and not _are_equal(getattr(owner, name), value):
                    return False
            return all(array._version == count for array, count in self.versions)
        except (LookupError, ValueError, AttributeError):  # the place is gone, or the cell is empty
            return False


def watch(layer: Callable[..., Any], others: Iterable[object] = ()) -> Watch:
    """Return the places that a layer, and other functions that it may call, lead to."""
    places, known = Watch(), {}
    home = _package_of(_innermost(layer))
    waiting = deque([layer, *others])
    while waiting and len(places.items) + len(places.attributes) < MOST:
        value = waiting.popleft()
        if id(value) in known or isinstance(value, _COMPARED):
            continue
        known[id(value)] = value  # alive, so that no other object gets its number
        if is_array(value):
            places.versions += _version(value)
            continue
        for owner, index, part in _parts(value, home):
            if isinstance(owner, Mapping | list):
                places.items.append((owner, index, part))
            elif owner is not None:
                places.attributes.append((owner, index, part))
            waiting.append(part)
    return places


def _are_equal(one: object, other: object) -> bool:
    return type(one) is type(other) and isinstance(one, _COMPARED) and one == other


def _version(array: Any) -> Iterator[tuple[Any, int]]:
    """Yield an array and the count of what was written to it, as torch has it except in its inference mode."""
    try:
        yield array, array._version
    except (AttributeError, RuntimeError):
        return


def _parts(value: Any, home: str) -> Iterator[tuple[Any, Any, Any]]:
    """Yield what an object holds, with the owner and the index of the place, or None twice."""
    if isinstance(value, types.FunctionType):
        if _is_watched(value, home):
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # a name that is assigned later
                    yield cell, "cell_contents", cell.cell_contents
            yield from _unowned(value.__defaults__ or ())
            yield from _items(value.__kwdefaults__ or {})
            yield from _items(value.__dict__)
            yield from _named_globals(value)
    elif isinstance(value, types.MethodType):
        yield from _unowned((value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        yield from _unowned((value.func, *value.args))
        yield from _items(value.keywords)
    elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
        names = ("fget", "func", "__func__")
        yield from _unowned(getattr(value, name) for name in names if hasattr(value, name))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from _unowned((value.__wrapped__,))
    elif isinstance(value, dict):
        yield from _items(value)
    elif isinstance(value, list):
        yield from ((value, index, part) for index, part in enumerate(value))
    elif isinstance(value, tuple | set | frozenset | deque):
        yield from _unowned(value)
    elif isinstance(value, type):
        if _package_of(value) not in LIBRARIES:
            yield from ((vars(value), name, part) for name, part in vars(value).items() if name[:2] != "__")
            yield from _unowned([vars(value).get("__call__"), *value.__bases__])
    elif not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    kind = type(value)
    if _package_of(kind) in LIBRARIES - {"sdpa_xp", "torch"}:
        return
    yield from _items(getattr(value, "__dict__", {}))
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield value, name, getattr(value, name)
    yield None, None, kind


def _named_globals(function: types.FunctionType) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the globals that a function names, and what it names of a module of the caller."""
    scope, names = function.__globals__, {*_names(function.__code__)}
    for name in names & scope.keys():
        part = scope[name]
        if not isinstance(part, types.ModuleType):
            yield scope, name, part
        elif part.__name__.partition(".")[0] not in LIBRARIES:
            yield from ((vars(part), inner, vars(part)[inner]) for inner in names & vars(part).keys())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_watched(function: types.FunctionType, home: str) -> bool:
    """Return whether a function may hold what the caller changes, and is not one of an installed package."""
    package = _package_of(function)
    is_installed = "site-packages" in function.__code__.co_filename
    return package not in LIBRARIES and (package == home or not is_installed)


def _innermost(layer: Any) -> Any:
    """Return the function or the class that a layer was written as."""
    while isinstance(layer, functools.partial | types.MethodType):
        layer = layer.func if isinstance(layer, functools.partial) else layer.__self__
    return layer if hasattr(layer, "__qualname__") else type(layer)


def _package_of(value: object) -> str:
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


def _items(mapping: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    return ((mapping, index, part) for index, part in [*mapping.items()])


def _unowned(parts: Iterable[Any]) -> Iterator[tuple[Any, Any, Any]]:
    return ((None, None, part) for part in parts)
