"""What one object of a layer holds, in containers: dictionaries, lists, cells, slots, and named globals.

A layer may be any callable. So what it holds may stand in attributes, slots and containers; in the closure, the
defaults and the attributes of a function, and in the globals that it names; in partials, methods, classes and
their attributes; and in what the standard library has for values, such as `types.SimpleNamespace`.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

from .._arrays.dispatch import is_array_elsewhere
from .._packages import ARRAY_LIBRARIES, LIBRARIES, package_of

_WITHOUT_STATE = ARRAY_LIBRARIES - {"sdpa_xp", "sdpa_xp_export", "torch"}
_WITHOUT_STATE |= {"_io", "_thread", "asyncio", "concurrent", "io", "logging", "multiprocessing", "queue"}
_WITHOUT_STATE |= {"selectors", "socket", "ssl", "subprocess", "threading"}
"""Modules whose objects are no parameters, or change without an effect on a layer: locks, loggers, files."""
_OF_SCOPE = {f"{how}_{what}" for how in ("LOAD", "STORE", "DELETE") for what in ("GLOBAL", "NAME")}
MOST = 100_000
"""The most objects that are looked at. A layer that leads to more is connected with half of the program."""
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
    if is_held_array(value):
        if (
            attributes := attributes_of(value)
        ) is not None:  # of a tensor, or of an array of a class of the caller
            yield attributes, attributes, f"{type(value).__name__}."
    elif isinstance(value, types.FunctionType):
        if package_of(value) not in ARRAY_LIBRARIES:
            yield from ((cell, cell, name) for name, cell in closure_of(value))
            yield _named_attributes(value, ["__code__", "__defaults__", "__kwdefaults__"])
            yield value.__dict__, value.__dict__, f"{value.__name__}."
            yield from _named_globals(value, home)
    elif isinstance(value, types.MethodType):
        yield from _of_itself((value.__func__, value.__self__))
    elif isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType):
        yield from _of_itself((value.__self__,))  # such as `weights.get`
    elif functions := wrapped_functions(value):
        yield from _of_itself((*functions.values(),))
    elif isinstance(value, type):
        if package_of(value) not in LIBRARIES:
            yield vars(value), value, f"{value.__name__}."
            bases = Named(functools.partial(getattr, value), ["__bases__"])
            yield bases, bases, f"{value.__name__}."
            yield from _of_itself((type(value), *value.__bases__))
    elif isinstance(value, ContextVar):
        yield Named(lambda _, missing: value.get(missing), ["value"]), value, ""
    elif isinstance(value, weakref.ref):
        yield Named(lambda *_: value(), ["object"]), value, ""
    elif isinstance(value, types.ModuleType):
        if package_of_module(value) not in LIBRARIES and "-packages" not in str(getattr(value, "__file__", "")):
            yield vars(value), vars(value), f"{value.__name__}."
    else:
        if isinstance(value, functools.partial):
            yield from _of_itself((value.func, *value.args), value.keywords)
        elif isinstance(value, KeysView | ValuesView | ItemsView):
            yield from _of_itself((getattr(value, "mapping", None),))
        elif isinstance(value, dict | list | set | frozenset | tuple | deque | types.MappingProxyType):
            yield from _of_itself(value)
        yield from _attributes(value)


def is_held_array(value: Any) -> bool:
    """Return whether an object is an array: np.ndarray itself has the methods of arrays, and is none."""
    try:
        return is_array_elsewhere(value) and not isinstance(value, type)
    except Exception:  # an object may answer any attribute with any error
        return False


def _of_itself(*parts: Any) -> Iterator[Container]:
    return ((one, one, "") for one in parts if one or not isinstance(one, tuple))


def _named_attributes(value: Any, names: list[str]) -> Container:
    return Named(functools.partial(getattr, value), names), value, f"{type(value).__name__}."


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the dictionary with the attributes of an object, if it has one."""
    try:
        attributes = value.__dict__
    except Exception:  # an object may answer any attribute with any error
        return None
    return attributes if isinstance(attributes, dict) else None


def _attributes(value: Any) -> Iterator[Container]:
    kind = type(value)
    if package_of(kind) in _WITHOUT_STATE and kind is not threading.local:
        return
    yield from _of_itself((kind,))
    if (attributes := attributes_of(value)) is not None:
        yield attributes, attributes, f"{kind.__name__}."
    if (slots := slot_names(kind)) and package_of(kind) != "sdpa_xp_export":  # sessions of another layer of jit
        yield _named_attributes(value, slots)


def _named_globals(function: types.FunctionType, home: str) -> Iterator[Container]:
    """Yield the globals that a function of the caller names, and what it names of modules."""
    package = package_of(function)
    if package in LIBRARIES or ("-packages" in function.__code__.co_filename and package != home):
        return  # of Python, or of site-packages or dist-packages
    of_scope, names = code_names(function.__code__)
    yield Named(function.__globals__.get, [*of_scope]), function.__globals__, ""
    modules = [function.__globals__.get(name) for name in of_scope] + [*map(sys.modules.get, names)]
    known: set[int] = set()
    while modules:
        if is_module_of_caller(module := modules.pop()) and id(module) not in known:
            known.add(id(module))
            scope = vars(module)
            yield Named(scope.get, [*names]), scope, f"{scope['__name__']}."
            modules += [scope.get(name) for name in names]


def is_module_of_caller(part: object) -> bool:
    """Return whether an object is a module, and not one of a library of arrays."""
    return isinstance(part, types.ModuleType) and package_of_module(part) not in ARRAY_LIBRARIES


def package_of_module(module: types.ModuleType) -> str:
    return module.__name__.partition(".")[0]


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


@functools.lru_cache(4096)
def code_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the globals that some code and the code within it names, and these with attributes and texts.

    A text may be the name of an attribute in `getattr`, or of a global in `globals()`.
    """
    of_scope = {str(step.argval) for step in dis.get_instructions(code) if step.opname in _OF_SCOPE}
    texts = {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
    of_scope |= texts if "globals" in of_scope else set()
    names = {*code.co_names, *texts}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            of_inner = code_names(inner)
            of_scope, names = of_scope | of_inner[0], names | of_inner[1]
    return frozenset(of_scope), frozenset(names)


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
