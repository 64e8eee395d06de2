"""What one object of a layer holds, in containers: dictionaries, lists, cells, slots, and named globals.

A layer may be any callable. So what it holds may stand in attributes, slots and containers; in the closure, the
defaults and the attributes of a function, and in the globals that it names; in partials, methods, classes and
their attributes; and in what the standard library has for values, such as `types.SimpleNamespace`.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

from sdpa_xp_export._packages import ARRAY_LIBRARIES, LIBRARIES, package_of

_WITHOUT_STATE = ARRAY_LIBRARIES - {"sdpa_xp", "torch"}
_WITHOUT_STATE |= {
    "_io",
    "_thread",
    "asyncio",
    "concurrent",
    "io",
    "logging",
    "multiprocessing",
    "queue",
    "selectors",
}
_WITHOUT_STATE |= {"socket", "ssl", "subprocess", "threading"}
"""Modules whose objects are no parameters, or change without an effect on a layer: locks, loggers, files."""
MISSING = object()
"""Stands for a name that has no value."""


@dataclass(slots=True, eq=False)
class Named:
    """Names of which some may have no value: those of a scope, or the slots of an object."""

    get: Callable[[Any, Any], Any]
    names: list[str]

    def __iter__(self) -> Iterator[Any]:
        return map(self.get, self.names, repeat(MISSING))

    def __len__(self) -> int:
        return len(self.names)


Container: TypeAlias = tuple[Any, Any, str]
"""A mapping, a list, a tuple, a set, a deque, a cell or `Named`; the object that an assignment changes; and the
text before a key in an error, "Layer." before an attribute."""


def containers(value: Any, home: str) -> Iterator[Container]:
    """Yield what one object holds; `home` is the package of the layer, whose functions belong to the caller."""
    if isinstance(value, types.FunctionType):
        if package_of(value) not in LIBRARIES:
            yield from ((cell, cell, name) for name, cell in closure_of(value))
            yield from _of_itself(value.__defaults__ or (), value.__kwdefaults__ or {}, label=value.__name__)
            yield value.__dict__, value.__dict__, f"{value.__name__}."
            yield from _named_globals(value, home)
    elif isinstance(value, types.MethodType):
        yield from _of_itself((value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        yield from _of_itself((value.func, *value.args), value.keywords)
    elif functions := wrapped_functions(value):
        yield from _of_itself((*functions.values(),))
    elif isinstance(value, type):
        if package_of(value) not in LIBRARIES:
            yield vars(value), value, f"{value.__name__}."
            yield from _of_itself(value.__bases__)
    elif isinstance(value, ContextVar):
        yield Named(lambda _, missing: value.get(missing), ["value"]), value, ""
    elif isinstance(value, weakref.ref):
        yield Named(lambda *_: value(), ["object"]), value, ""
    elif package_of(type(value)) == "sdpa_xp_export":
        yield from _of_itself((getattr(value, "__wrapped__", None),))  # another layer of jit
    elif not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        if isinstance(value, dict | list | set | frozenset | tuple | deque | types.MappingProxyType):
            yield from _of_itself(value)
        yield from _attributes(value)


def _of_itself(*parts: Any, label: str = "") -> Iterator[Container]:
    return ((one, one, label) for one in parts if one or not isinstance(one, tuple))


def _attributes(value: Any) -> Iterator[Container]:
    kind, label = type(value), f"{type(value).__name__}."
    if package_of(kind) in _WITHOUT_STATE and kind is not threading.local:
        return
    yield from _of_itself((kind,))
    if isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield attributes, attributes, label
    if slots := slot_names(kind):
        yield Named(functools.partial(getattr, value), slots), value, label


def _named_globals(function: types.FunctionType, home: str) -> Iterator[Container]:
    """Yield the globals that a function of the caller names, and what it names of modules."""
    if "-packages" in function.__code__.co_filename and package_of(function) != home:
        return  # of site-packages or dist-packages
    scope, names = function.__globals__, {*code_names(function.__code__)}
    yield Named(scope.get, [*names]), scope, ""
    for name in names & scope.keys():
        if is_module_of_caller(part := scope[name]):
            yield Named(vars(part).get, [*(names & vars(part).keys())]), vars(part), f"{name}."


def is_module_of_caller(part: object) -> bool:
    """Return whether an object is a module, and not one of a library of arrays."""
    return isinstance(part, types.ModuleType) and part.__name__.partition(".")[0] not in ARRAY_LIBRARIES


def contents(container: Any) -> dict[Any, Any]:
    """Return what a container holds, by key; of a cell by ""."""
    if isinstance(container, Mapping):
        return dict(container)
    if isinstance(container, types.CellType):
        try:
            return {"": container.cell_contents}
        except ValueError:  # a name that is assigned later
            return {}
    if isinstance(container, Named):
        return dict(zip(container.names, container, strict=True))
    is_set = isinstance(container, set | frozenset)
    return {part: part for part in container} if is_set else dict(enumerate(container))


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    """Yield the variables of a closure, with their cells."""
    yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def home_of(layer: Any) -> Any:
    """Return the function or the class that a layer was written as."""
    while isinstance(layer, functools.partial | types.MethodType):
        layer = layer.func if isinstance(layer, functools.partial) else layer.__self__
    return layer if hasattr(layer, "__qualname__") else type(layer)


def code_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals, and of attributes, in some code and in the code within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from code_names(inner)


def slot_names(kind: type) -> list[str]:
    """Return the names of the slots of a class and its bases, as they are in its objects."""
    bases = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for base in bases for name, x in base.items() if isinstance(x, types.MemberDescriptorType)]


def wrapped_functions(value: object) -> dict[str, Any]:
    """Return the functions that a descriptor or a cache wraps."""
    if isinstance(value, property):
        return {name: x for name in ("fget", "fset", "fdel") if (x := getattr(value, name)) is not None}
    if isinstance(value, staticmethod | classmethod):
        return {"func": value.__func__}
    if isinstance(value, functools.cached_property | functools.partialmethod):
        return {"func": value.func}
    if isinstance(value, functools._lru_cache_wrapper):
        return {"func": value.__wrapped__}
    return {}
