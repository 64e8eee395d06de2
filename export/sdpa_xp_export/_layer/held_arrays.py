"""Copies of a layer with other arrays in place of those that it holds, wherever it holds them.

Only what leads to an array that changes is copied, so the objects of the caller stay as they are. A copy is
made without a call of its `__init__`.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias, cast

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from .._dtypes.dtype import to_numpy
from .._packages import LIBRARIES, package_of
from .contents import (
    MOST,
    Named,
    closure_of,
    containers,
    contents,
    home_of,
    is_held_array,
    slot_names,
    wrapped_functions,
)
from .layer import with_parameters

Change: TypeAlias = Callable[[Any], Any]
"""A function that returns another array for an array, or the same one if it does not change."""
ArrayChange: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]


Way: TypeAlias = tuple[
    Callable[[partial[Any], ArrayChange], partial[Any]], Callable[[], AbstractContextManager[object]]
]
"""A function that returns a copy of a layer, with `change(array)` in place of the arrays that it holds, and the
context in which the copy is called."""
_UNCOPIED = {"__dict__", "__weakref__", "__slots__", "__module__", "__qualname__", "__doc__", "__annotations__"}


def with_changed_arrays(
    layer: Callable[..., Any], change: Change, in_library: Change | None = None
) -> Callable[..., Any]:
    """Return a copy of `layer` with `change(array)` in place of each array; `layer` itself if none changes.

    With `in_library`, that is called for the arrays in the layers, masks and biases of `sdpa_xp`.
    """
    return cast(Callable[..., Any], _Copy(layer, change, in_library or change).copy_of(layer))


class _Copy:
    """The copies of all objects that lead to an array that changes, each made once."""

    def __init__(self, layer: object, change: Change, in_library: Change) -> None:
        self.change, self.in_library = change, in_library
        self.home = package_of(home_of(layer))
        self.changed: dict[int, Any] = {}
        self.known: dict[int, object] = {}  # keeps everything alive, so that identities stay different
        self.needed = self._leading_to_a_change(layer)
        self.copies: dict[int, Any] = {}
        self.globals: dict[int, dict[str, Any]] = {}
        self.cells: dict[int, types.CellType] = {}
        self.modules: dict[int, types.ModuleType] = {}

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
            if is_held_array(value):
                change = self.in_library if id(value) in library else self.change
                if (other := change(value)) is not value:
                    self.changed[id(value)] = other
                continue
            for container, _, _ in containers(value, self.home):
                for part in contents(container).values():
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

    def _copy(self, value: Any) -> None:
        key = id(value)
        if isinstance(value, types.FunctionType):
            self._copy_function(value)
        elif isinstance(value, types.MethodType):
            self.copies[key] = types.MethodType(self.copy_of(value.__func__), self.copy_of(value.__self__))
        elif isinstance(value, functools.partial):
            arguments, keywords = map(self.copy_of, value.args), self._copies_in(value.keywords)
            self.copies[key] = type(value)(self.copy_of(value.func), *arguments, **keywords)
        elif isinstance(value, type):
            if _may_be_copied(value):
                self._copy_class(value)
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
        attributes = getattr(value, "__dict__", {})
        for name, x in attributes.items():
            vars(copied)[name] = self.copy_of(x)
        for name in slot_names(type(value)):
            if hasattr(value, name):
                object.__setattr__(copied, name, self.copy_of(getattr(value, name)))

    def _copy_function(self, value: types.FunctionType) -> None:
        named = [one for one in containers(value, self.home) if isinstance(one[0], Named)]
        changed = [(scope, self._needed_in(names)) for names, scope, _ in named if isinstance(scope, dict)]
        scope = value.__globals__
        if any(parts for _, parts in changed):  # functions of a module share what they name
            scope = self.globals.setdefault(id(scope), dict(scope))
        # Filled later: a cell may lead to the function itself.
        cells = [self.cells.setdefault(id(cell), types.CellType()) for _, cell in closure_of(value)]
        copied = types.FunctionType(value.__code__, scope, value.__name__, None, tuple(cells) or None)
        self.copies[id(value)] = copied
        for cell, (_, original) in zip(cells, closure_of(value), strict=True):
            for inner in contents(original).values():
                cell.cell_contents = self.copy_of(inner)
        for of_module, parts in changed:
            target = scope
            if parts and of_module is not value.__globals__:
                module = self.modules.setdefault(id(of_module), types.ModuleType(of_module["__name__"]))
                scope |= {
                    name: module for name, x in scope.items() if getattr(x, "__dict__", None) is of_module
                }
                target = vars(module)
                target.update({name: x for name, x in of_module.items() if name not in target})
            target.update(self._copies_in(parts))
        copied.__defaults__ = value.__defaults__ and tuple(map(self.copy_of, value.__defaults__))
        copied.__kwdefaults__ = value.__kwdefaults__ and self._copies_in(value.__kwdefaults__)
        copied.__dict__.update(self._copies_in(value.__dict__))
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(copied, name, getattr(value, name))

    def _needed_in(self, container: Any) -> dict[str, Any]:
        return {name: x for name, x in contents(container).items() if id(x) in self.needed}

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


def _new(kind: type) -> Any:
    """Return an object of a class, without its attributes."""
    try:
        return object.__new__(kind)
    except TypeError:  # a class in C makes its objects itself
        copied: Any = cast(Any, kind).__new__(kind)
        return copied


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
    of_caller = [kind for kind in value.__mro__ if package_of(kind) not in LIBRARIES]
    told = any("__init_subclass__" in vars(kind) for kind in of_caller)
    return type(value).__module__ in ("builtins", "abc") and not told


def ways_to_copy(called: partial[Any]) -> Iterator[Way]:
    """Yield the ways to copy a layer, the best one first.

    A tensor of torch stays a tensor. Arrays of other libraries become NumPy arrays, which have float64 and
    nearly the same methods. A layer that needs other methods is called as it is.
    """
    kinds: set[str] = set()

    def noted(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            kinds.add("torch" if array_api_compat.is_torch_array(x) else "other")
        return x

    _changed(called, noted)
    if "torch" in kinds:
        yield _with_tensors, _tensors_take_arrays
    yield lambda called, change: _changed(called, lambda x: _numpy_array(x, change)), nullcontext
    if kinds:
        yield lambda called, _: called, nullcontext
    if "torch" in sys.modules and "torch" not in kinds:  # a layer may make tensors when it is called
        yield _with_tensors, _tensors_take_arrays


def _tensors_take_arrays() -> AbstractContextManager[object]:
    from .tensors import TensorsTakeArrays  # it imports torch

    return TensorsTakeArrays()


def _with_tensors(called: partial[Any], change: ArrayChange) -> partial[Any]:
    from .tensors import changed_tensor, is_plain_tensor

    def of_library(x: Any) -> NDArray[Any]:
        return _numpy_array(x, change)  # its layers take arrays of one library

    def of_caller(x: Any) -> Any:
        return changed_tensor(x, change) if is_plain_tensor(x) else _numpy_array(x, change)

    return _changed(called, of_caller, of_library)


def _numpy_array(x: Any, change: ArrayChange) -> NDArray[Any]:
    return change(x if isinstance(x, np.ndarray) else to_numpy("verify_layer", "weight", x))


def _changed(
    called: partial[Any], change: Callable[[Any], Any], in_library: Callable[[Any], Any] | None = None
) -> partial[Any]:
    """Return a layer with `change(array)` in place of the arrays that it holds, or else of its `parameters`."""

    def where_possible(change: Callable[[Any], Any], x: Any) -> Any:
        try:
            return change(x)
        except (TypeError, ValueError, RuntimeError):  # NumPy cannot hold it
            return x

    of_caller, of_library = (partial(where_possible, one) for one in (change, in_library or change))
    changed = with_changed_arrays(called, of_caller, of_library)
    if changed is called:
        changed = with_parameters(called, lambda _, x: of_library(x))
    return cast("partial[Any]", changed)
