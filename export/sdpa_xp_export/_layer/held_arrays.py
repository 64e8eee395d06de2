"""Copy a layer with other arrays in place of those that it holds, wherever it holds them.

A layer may be any callable: a function that names arrays and layers, or a method of an object that has them in
attributes. So its arrays are looked for in attributes, slots, lists and dictionaries; in the closure, the
defaults and the attributes of a function, and in the globals that it names; in partials and methods; and in the
attributes of a class. Only what leads to an array that changes is copied, so the objects of the caller stay as
they are. A copy is made without a call of its `__init__`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from sdpa_xp_export._arrays.operators import is_array
from sdpa_xp_export._packages import LIBRARIES, package_of

Change: TypeAlias = Callable[[Any], Any]
"""A function that returns another array for an array, or the same one if it does not change."""
MOST = 100_000
"""The most objects that are looked at: a layer that leads to more is connected with half of the program."""
_CONTAINERS = (list, dict, set, frozenset, tuple, deque)
_UNCOPIED = {"__dict__", "__weakref__", "__slots__", "__module__", "__qualname__", "__doc__", "__annotations__"}


def with_changed_arrays(
    layer: Callable[..., Any], change: Change, in_library: Change | None = None
) -> Callable[..., Any]:
    """Return a copy of `layer` with `change(array)` in place of each array; `layer` itself if none changes.

    With `in_library`, that is called for the arrays in the layers, masks and biases of `sdpa_xp`.
    """
    return cast(Callable[..., Any], _Copy(layer, change, in_library or change).copy_of(layer))


@dataclass(frozen=True, slots=True, eq=False)
class _ModuleInPart:
    """A module of the caller, with what a function names in it."""

    module: types.ModuleType
    named: dict[str, Any]


class _Copy:
    """The copies of all objects that lead to an array that changes, each made once."""

    def __init__(self, layer: object, change: Change, in_library: Change) -> None:
        self.change, self.in_library = change, in_library
        self.home = package_of(home_of(layer))
        self.changed: dict[int, Any] = {}
        self.named: dict[int, dict[str, Any]] = {}
        self.known: dict[int, object] = {}  # keeps everything alive, so that identities stay different
        self.needed = self._leading_to_a_change(layer)
        self.copies: dict[int, Any] = {}
        self.globals: dict[int, dict[str, Any]] = {}

    def _leading_to_a_change(self, layer: object) -> set[int]:
        """Return the identities of the objects that an array which changes is reached from."""
        owners: dict[int, list[int]] = {}
        library: set[int] = set()
        waiting = [layer]
        while waiting and len(self.known) < MOST:
            value = waiting.pop()
            if id(value) in self.known:
                continue
            self.known[id(value)] = value
            if is_array(value) and not isinstance(value, type):  # np.ndarray itself has the methods of arrays
                change = self.in_library if id(value) in library else self.change
                if (other := change(value)) is not value:
                    self.changed[id(value)] = other
                continue
            for part in self._parts(value):
                owners.setdefault(id(part), []).append(id(value))
                if package_of(type(value)) == "sdpa_xp":
                    library.add(id(part))
                waiting.append(part)
        needed: set[int] = set()
        reached = [*self.changed]
        while reached:
            if (one := reached.pop()) not in needed:
                needed.add(one)
                reached += owners.get(one, [])
        return needed

    def copy_of(self, value: Any) -> Any:
        """Return the copy of an object; the object itself if it leads to no array that changes."""
        key = id(value)
        if key not in self.needed:
            return value
        if key in self.changed:
            return self.changed[key]
        if key not in self.copies:
            # Until it is copied, so that a circle ends; and if it cannot be copied, it stays.
            self.copies[key] = value
            self._copy(value)
        return self.copies[key]

    def _parts(self, value: Any) -> Iterator[Any]:
        """Yield the objects that one object holds."""
        if isinstance(value, types.FunctionType):
            if not _in_library(value):
                yield from (*(value.__closure__ or ()), *(value.__defaults__ or ()))
                for named in (value.__kwdefaults__ or {}, value.__dict__, self._named_globals(value)):
                    yield from named.values()
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.CellType):
            yield from _contents(value)
        elif isinstance(value, type):
            if not _in_library(value) and _may_be_copied(value):
                yield from (x for name, x in vars(value).items() if name not in _UNCOPIED)
                yield from value.__bases__
        elif wrapped := wrapped_functions(value):
            yield from wrapped.values()
        elif isinstance(value, _ModuleInPart):
            yield from value.named.values()
        else:
            if isinstance(value, dict):
                yield from value.values()
            elif isinstance(value, _CONTAINERS):
                yield from value
            if self._holds_attributes(value):
                yield from _attributes(value).values()
                yield type(value)

    def _copy(self, value: Any) -> None:
        key = id(value)
        if isinstance(value, types.FunctionType):
            self._copy_function(value)
        elif isinstance(value, types.MethodType):
            self.copies[key] = types.MethodType(self.copy_of(value.__func__), self.copy_of(value.__self__))
        elif isinstance(value, functools.partial):
            arguments, keywords = map(self.copy_of, value.args), self._copies_in(value.keywords)
            self.copies[key] = type(value)(self.copy_of(value.func), *arguments, **keywords)
        elif isinstance(value, types.CellType):
            self.copies[key] = cell = types.CellType()
            for contents in _contents(value):
                cell.cell_contents = self.copy_of(contents)
        elif isinstance(value, type):
            self._copy_class(value)
        elif isinstance(value, _ModuleInPart):
            self.copies[key] = module = types.ModuleType(value.module.__name__)
            vars(module).update({**vars(value.module), **self._copies_in(value.named)})
        elif wrapped := wrapped_functions(value):
            self.copies[key] = _wrapped_again(value, self._copies_in(wrapped))
        elif isinstance(value, tuple | frozenset):  # these are filled when they are made
            items = map(self.copy_of, value)
            copied = value._make(items) if hasattr(value, "_make") else type(value)(items)
            self.copies[key] = copied
        else:
            self._copy_object(value)

    def _copies_in(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.copy_of(x) for name, x in named.items()}

    def _copy_object(self, value: Any) -> None:
        """Copy a list, a dictionary, a set, or an object with attributes."""
        try:
            is_container = isinstance(value, list | dict | set | deque)
            copied: Any = copy.copy(value) if is_container else _new(self.copy_of(type(value)))
        except TypeError:  # it needs arguments
            return
        self.copies[id(value)] = copied
        if isinstance(value, dict):
            for name, x in value.items():
                dict.__setitem__(copied, name, self.copy_of(x))
        elif isinstance(value, set):
            copied.clear()
            copied.update(map(self.copy_of, value))
        elif isinstance(value, list | deque):
            for number, x in enumerate(value):
                copied[number] = self.copy_of(x)
        if self._holds_attributes(value):
            for name, x in _attributes(value).items():
                if isinstance(getattr(copied, "__dict__", None), dict) and name in vars(value):
                    vars(copied)[name] = self.copy_of(x)
                else:
                    object.__setattr__(copied, name, self.copy_of(x))

    def _copy_function(self, value: types.FunctionType) -> None:
        named = self._named_globals(value)
        scope = value.__globals__
        if any(id(x) in self.needed for x in named.values()):  # functions of a module share what they name
            scope = self.globals.setdefault(id(scope), dict(scope))
        closure = value.__closure__ and tuple(map(self.copy_of, value.__closure__))
        copied = types.FunctionType(value.__code__, scope, value.__name__, None, closure)
        self.copies[id(value)] = copied
        for name, x in named.items():
            if id(x) in self.needed:
                scope[name] = self.copy_of(x)
        copied.__defaults__ = value.__defaults__ and tuple(map(self.copy_of, value.__defaults__))
        copied.__kwdefaults__ = value.__kwdefaults__ and self._copies_in(value.__kwdefaults__)
        copied.__dict__.update(self._copies_in(value.__dict__))
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(copied, name, getattr(value, name))

    def _copy_class(self, value: type) -> None:
        """Copy a class with its functions: `super()` and the globals that they name lead to copies."""
        # With the old functions first: they may lead to the class itself, of which there is a copy only then.
        namespace = {name: x for name, x in vars(value).items() if name not in ("__dict__", "__weakref__")}
        for name in namespace.get("__slots__", ()):
            namespace.pop(name, None)
        bases = tuple(self.copy_of(base) for base in value.__bases__)
        copied: Any = type(value)(value.__name__, bases, namespace)
        self.copies[id(value)] = copied
        for name, x in namespace.items():
            if id(x) in self.needed and name not in _UNCOPIED:
                type.__setattr__(copied, name, self.copy_of(x))

    def _named_globals(self, value: types.FunctionType) -> dict[str, Any]:
        """Return the globals that a function names, and the ones that functions within it name."""
        if not self._is_own(value):
            return {}
        if id(value) not in self.named:
            scope, names = value.__globals__, {*code_names(value.__code__)}
            attributes = {name: scope[name] for name in names if name in scope}
            for name, x in attributes.items():
                if isinstance(x, types.ModuleType) and x.__name__.partition(".")[0] not in LIBRARIES:
                    attributes[name] = _ModuleInPart(x, {n: y for n, y in vars(x).items() if n in names})
            self.named[id(value)] = attributes
        return self.named[id(value)]

    def _is_own(self, value: types.FunctionType) -> bool:
        """Return whether a function belongs to the caller, not to a package that is installed."""
        file = value.__code__.co_filename
        installed = "site-packages" in file or "dist-packages" in file
        return not installed or package_of(value) == self.home

    def _holds_attributes(self, value: object) -> bool:
        """Return whether the attributes of an object may be parameters."""
        if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            return False
        kind = type(value)
        package = package_of(kind)
        known = package in ("sdpa_xp", "types") or any(
            (base.__module__, base.__name__) == ("torch.nn.modules.module", "Module") for base in kind.__mro__
        )
        return known or package not in LIBRARIES


def home_of(layer: Any) -> Any:
    """Return the function or the class that a layer was written as."""
    while isinstance(layer, functools.partial | types.MethodType):
        layer = layer.func if isinstance(layer, functools.partial) else layer.__self__
    return layer if hasattr(layer, "__qualname__") else type(layer)


def _in_library(value: object) -> bool:
    """Return whether a function or a class is one of the libraries that hold no parameters."""
    return package_of(value) in LIBRARIES


def _new(kind: type) -> Any:
    """Return an object of a class, without its attributes."""
    try:
        return object.__new__(kind)
    except TypeError:  # a class in C makes its objects itself
        copied: Any = cast(Any, kind).__new__(kind)
        return copied


def code_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals, and of attributes, in some code and in the code within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from code_names(inner)


def _contents(cell: types.CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # it is empty yet
        return


def _attributes(value: object) -> dict[str, Any]:
    """Return the attributes that an object itself has, in its `__dict__` and its slots."""
    slots = {name: getattr(value, name) for name in slot_names(type(value)) if hasattr(value, name)}
    return dict(getattr(value, "__dict__", {})) | slots


def slot_names(kind: type) -> list[str]:
    """Return the names of the slots of a class and its bases."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if isinstance(getattr(kind, name, None), types.MemberDescriptorType)]


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


def _wrapped_again(value: Any, functions: dict[str, Any]) -> Any:
    """Return a descriptor or a cache like `value`, of other functions."""
    if isinstance(value, property):
        return property(**functions, doc=value.__doc__)
    if isinstance(value, functools._lru_cache_wrapper):
        return functools.lru_cache(**value.cache_parameters())(functions["func"])
    if isinstance(value, functools.partialmethod):
        return functools.partialmethod(functions["func"], *value.args, **value.keywords)
    copied = type(value)(functions["func"])
    if isinstance(value, functools.cached_property):
        copied.attrname = value.attrname
    return copied


def _may_be_copied(value: type) -> bool:
    """Return whether another class like `value` can be made, and no one is told of it."""
    of_caller = [kind for kind in value.__mro__ if not _in_library(kind)]
    told = any("__init_subclass__" in vars(kind) for kind in of_caller)
    return type(value).__module__ in ("builtins", "abc") and not told
