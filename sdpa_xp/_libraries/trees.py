"""Values as trees: their arrays, the same values with other arrays, and objects that JAX takes apart.

The branches of options are tuples, and dataclasses that say along which axes of the scores the axes of their
arrays lie, in `array_axes`: masks and biases, and what they become when they are bound to a grid.

JAX has no protocol for pytrees, only a registry of classes, and it is not imported here. So a class is
registered when an object of it is created, or when the first JAX array is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from operator import is_
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar, cast

from . import is_array, libraries
from .base import is_compiling

K = TypeVar("K", bound=type)
V = TypeVar("V")
Test: TypeAlias = Callable[[object], bool]
REGISTERED: set[type] = set()
WAITING: set[type] = set()
"""The classes of objects that were created before JAX was imported."""
_NAMES: dict[type, tuple[str, ...]] = {}
"""The attributes of each class.

These three need no lock, also without the GIL: their operations are atomic, and what two threads do at once,
they do twice. JAX refuses the second registration of a class, which `register_waiting` ignores."""


class Tree:
    """The base class of what JAX takes apart: register each class at the first object of it.

    A caller's class is not registered when it is defined, so that the caller can still register it.
    """

    __slots__ = ("_leaves",)
    _leaves: tuple[Any, ...]
    """The children and the static part of an object whose children are no arrays, such as axes or shardings.
    Its attributes alone do not say which of these are leaves."""
    _caches: ClassVar[tuple[str, ...]] = ()
    """The attributes that are computed anew when they are None."""

    def __new__(cls, *_args: object, **_keywords: object) -> Self:
        may_wait = cls in WAITING and "jax.tree_util" not in sys.modules
        # torch traces masks that a compiled function creates
        if not (may_wait or cls in REGISTERED or is_compiling()):
            register(cls)
        return super().__new__(cls)

    def _tree_state(self) -> dict[str, object]:
        """Return the attributes of which some hold arrays."""
        names = _attribute_names(type(self))
        state = {name: getattr(self, name) for name in names if hasattr(self, name)}
        attributes = getattr(self, "__dict__", {})
        cached = {name for name in attributes if isinstance(getattr(type(self), name, None), cached_property)}
        not_fields = sorted(attributes.keys() - state.keys() - cached - {*self._caches})
        return state | {name: attributes[name] for name in not_fields}

    def _set_tree_state(self, state: dict[str, Any]) -> None:
        """Set the attributes of an object that has none yet."""
        for name in self._caches:
            object.__setattr__(self, name, None)
        for name, value in state.items():
            object.__setattr__(self, name, value)


def register(kind: type) -> None:
    """Register a class with JAX if JAX is loaded, with all that waited for this; else it waits."""
    WAITING.add(kind)
    if hasattr(sys.modules.get("jax.tree_util"), "register_pytree_with_keys"):
        for library in libraries():
            library.register_trees()


def without_arrays(kind: K) -> K:
    """Say of a class, as a decorator, that JAX has nothing to look for in it: not the items of a NamedTuple."""
    register(kind)
    return kind


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with `change(leaf)` in place of each array and of what is not taken apart.

    Tuples, lists, dicts, dataclasses and trees are taken apart. Of a tree, only arrays are changed.
    """
    if isinstance(value, Tree):
        tree: Tree = object.__new__(type(value))
        of_array = partial(_changed_array, change)
        tree._set_tree_state({name: mapped(of_array, part) for name, part in value._tree_state().items()})
        return tree
    if isinstance(value, (tuple, list)):
        return getattr(value, "_make", type(value))([mapped(change, part) for part in value])
    if isinstance(value, dict):
        new: Any = {} if type(value) is dict else copy(value)  # torch.compile copies none
        new.update({key: mapped(change, part) for key, part in value.items()})
        return new
    if is_dataclass(value) and not (isinstance(value, type) or hasattr(value, "dtype")):  # no array
        new = copy(value)
        for field in fields(value):
            object.__setattr__(new, field.name, mapped(change, getattr(value, field.name)))
        return new
    return change(value)


def has_array_axes(value: object) -> bool:
    """Return whether a value is a mask, a bias, or what one becomes when it is bound to a grid."""
    return hasattr(type(value), "array_axes")


class Leaf(NamedTuple):
    """An array of a value, and where it is."""

    array: Any = None
    path: str = ""
    """Such as ".parts.0.slopes"."""
    holder: object = None
    """The branch that holds it; of an array in a tuple, what holds the tuple."""
    argument: str = ""
    """The field of `holder` that it is in; "" without a holder."""


ROOT = Leaf()


def leaves(value: Any, is_branch: Test = has_array_axes, place: Leaf = ROOT) -> Iterator[Leaf]:
    """Return the arrays in tuples, lists and branches, which are dataclasses."""
    if is_array(value):
        yield place._replace(array=value)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            if not isinstance(item, int):  # a mask may list one for each token
                yield from leaves(item, is_branch, place._replace(path=f"{place.path}.{number}"))
    elif is_branch(value):
        for name, argument in _arguments(value).items():
            yield from leaves(argument, is_branch, Leaf(None, f"{place.path}.{name}", value, name))


def with_arrays(
    value: V, change: Callable[[Any], Any], is_leaf: Test = is_array, is_branch: Test = has_array_axes
) -> V:
    """Return a value with `change(array)` in place of each array, or other leaf, in the order of `leaves`.

    The class of a branch checks its new fields, and computes those that follow from others.
    """
    again = partial(with_arrays, change=change, is_leaf=is_leaf, is_branch=is_branch)
    new: Any = value
    if is_leaf(value):
        new = change(value)
    elif hasattr(value, "with_values"):  # see `Integers`
        new = new.with_values(again(new.values))
    elif isinstance(value, (tuple, list)):
        items = [item if isinstance(item, int) else again(item) for item in value]
        if not all(map(is_, items, value)):  # some classes take no list of their items
            new = getattr(value, "_make", type(value))(items)
    elif is_branch(value):
        new = replace(new, **{name: again(argument) for name, argument in _arguments(new).items()})
    return cast(V, new)


def _arguments(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def _changed_array(change: Callable[[Any], Any], value: Any) -> Any:
    return change(value) if hasattr(value, "shape") and hasattr(value, "dtype") else value


def _attribute_names(kind: type) -> tuple[str, ...]:
    """Return the fields and slots of a class, in their order."""
    if kind in _NAMES:
        return _NAMES[kind]
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    left_out = {"_leaves", "__dict__", "__weakref__", *getattr(kind, "_caches", ())}
    _NAMES[kind] = without_caches = tuple(name for name in dict.fromkeys(names) if name not in left_out)
    return without_caches
