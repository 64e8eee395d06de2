"""Masks, biases, layers, caches and rotations as pytrees of JAX: arrays are the leaves, all else is static.

JAX has no protocol for pytrees, only a registry of classes, and it is not imported here. So a class is
registered when an object of it is created, or when the first JAX array is seen. Objects are taken apart by
their attributes and put together without `__init__`, since JAX also puts tracers, axes and placeholders where
arrays were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar, cast

from ..errors import PACKAGE
from .base import is_compiling

K = TypeVar("K", bound=type)
Token: TypeAlias = object
"""What stands for a value in the static part: `CHILD`, a `Walked`, a `Static`, or a value of a static type."""
STATIC_TYPES = frozenset({type(None), int, str})
"""The types whose values are equal to no value of another type that stands in a static part."""
_REGISTERED: set[type] = set()
_WAITING: set[type] = set()
"""The classes of objects that were created before JAX was imported."""
_NAMES: dict[type, tuple[str, ...]] = {}
"""The attributes of each class.

These three need no lock, also without the GIL: their operations are atomic, and what two threads do at once,
they do twice. JAX refuses the second registration of a class, which `register` ignores."""


class Tree:
    """The base class of what JAX takes apart: register each class at the first object of it.

    A caller's class is not registered when it is defined, so that the caller can still register it.
    """

    __slots__ = ("_leaves",)
    _leaves: tuple[tuple[object, ...], Walked]
    """The children and the static part of an object whose children are no arrays, such as axes or shardings.
    Its attributes alone do not say which of these are leaves."""
    _caches: ClassVar[tuple[str, ...]] = ()
    """The attributes that are computed anew when they are None."""

    def __new__(cls, *_args: object, **_keywords: object) -> Self:
        may_wait = cls in _WAITING and "jax.tree_util" not in sys.modules
        # torch traces masks that a compiled function creates
        if not (may_wait or cls in _REGISTERED or is_compiling()):
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


class Walked(NamedTuple):
    """A tuple, a list, a dict or a `Tree` that holds other values."""

    kind: type
    names: tuple[object, ...] | None
    """The keys of a dict, or the attributes; None for a tuple and a list."""
    parts: tuple[Token, ...]


class Static:
    """A static value, which is equal only to values of its type: 1 is not True, and 0.0 is not -0.0."""

    __slots__ = ("key", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.key = (type(value), repr(value) if isinstance(value, float | complex) else value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[type, tuple[object]]:
        return Static, (self.value,)  # the type of a function has no name to be unpickled by

    def __repr__(self) -> str:
        return repr(self.value)


class Child:
    """Where a child is. There is one object of it, `CHILD`, also after a copy and in an unpickled structure."""

    def __reduce__(self) -> str:
        return "CHILD"

    def __repr__(self) -> str:
        return "*"


CHILD = Child()


def register(kind: type) -> None:
    """Register a class with JAX if JAX is loaded, with all that waited for this; else it waits."""
    _WAITING.add(kind)
    add = getattr(sys.modules.get("jax.tree_util"), "register_pytree_with_keys", None)
    if add is None:
        return
    for waiting in _WAITING.copy():  # a copy is atomic: another thread may add a class meanwhile
        _REGISTERED.add(waiting)
        _WAITING.discard(waiting)
        functions = (_flatten_with_keys, _flatten) if issubclass(waiting, Tree) else (_as_static, _as_static)
        with suppress(ValueError):  # its author has registered it
            add(waiting, functions[0], _unflatten, functions[1])


def without_arrays(kind: K) -> K:
    """Say of a class, as a decorator, that JAX has nothing to look for in it: not the items of a NamedTuple."""
    register(kind)
    return kind


def register_all() -> None:
    """Register the classes of the library, and those of which there are objects."""
    for kind in (*_own_classes(Tree), *_WAITING.copy()):
        if kind not in _REGISTERED:
            register(kind)


def _own_classes(kind: type) -> Iterator[type]:
    derived: type
    for derived in type.__subclasses__(kind):
        if derived.__module__.startswith(f"{PACKAGE}."):
            yield derived
            yield from _own_classes(derived)


def _as_static(value: object) -> tuple[tuple[()], Static]:
    return (), Static(value)


def _flatten(tree: Tree) -> tuple[tuple[object, ...], Walked]:
    known: tuple[tuple[object, ...], Walked] | None = getattr(tree, "_leaves", None)
    if known is not None:
        return known
    children: list[object] = []
    state = tree._tree_state()
    parts = tuple(_taken_apart(value, children) for value in state.values())
    return tuple(children), Walked(type(tree), tuple(state), parts)


def _flatten_with_keys(tree: Tree) -> tuple[tuple[tuple[object, object], ...], Walked]:
    children, structure = _flatten(tree)
    return tuple(zip(map(_key_type(), _paths(structure)), children, strict=True)), structure


@cache
def _key_type() -> Any:
    """Return the class of our keys. JAX's own has no `key`, which JAX reads to say how two trees differ."""
    attribute = sys.modules["jax.tree_util"].GetAttrKey

    def as_attribute(key: Any) -> tuple[Any, tuple[str]]:
        return attribute, (key.name,)

    return type("AttributeKey", (attribute,), {"key": property(attrgetter("name")), "__reduce__": as_attribute})


def _unflatten(structure: Walked | Static, children: Iterable[object]) -> object:
    if isinstance(structure, Static):
        return structure.value
    children = tuple(children)
    rest = iter(children)
    tree: Tree = object.__new__(structure.kind)
    names = cast(tuple[str, ...], structure.names)  # attributes, since the kind is a Tree
    tree._set_tree_state(dict(zip(names, (_put_together(part, rest) for part in structure.parts), strict=True)))
    if not all(map(_is_child, children)):
        object.__setattr__(tree, "_leaves", (children, structure))
    return tree


def _taken_apart(value: Any, children: list[object]) -> Token:
    """Return the static part of a value, and append its children."""
    kind = type(value)
    if kind in STATIC_TYPES:
        return value
    if kind is dict:
        return Walked(kind, tuple(value), tuple(_taken_apart(item, children) for item in value.values()))
    if kind is list or (isinstance(value, tuple) and (kind is tuple or hasattr(kind, "_fields"))):
        if set(map(type, value)) == {int}:  # a table of blocks has many
            return Walked(kind, None, tuple(value))
        return Walked(kind, None, tuple(_taken_apart(item, children) for item in value))
    if _is_child(value):
        children.append(value)
        return CHILD
    return Static(value)


def _put_together(token: Token, children: Iterator[object]) -> Any:
    if token is CHILD:
        return next(children)
    if isinstance(token, Walked):
        parts = [_put_together(part, children) for part in token.parts]
        if token.names is not None:
            return dict(zip(token.names, parts, strict=True))
        return parts if token.kind is list else tuple.__new__(token.kind, parts)
    return token.value if isinstance(token, Static) else token


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


def _changed_array(change: Callable[[Any], Any], value: Any) -> Any:
    return change(value) if hasattr(value, "shape") and hasattr(value, "dtype") else value


def _paths(structure: Walked, prefix: str = "") -> Iterator[str]:
    """Return the name of each child, such as "weight" or "layers.0", as in the `parameters` of a layer."""
    for name, part in zip(structure.names or range(len(structure.parts)), structure.parts, strict=True):
        if part is CHILD:
            yield f"{prefix}{name}"
        elif isinstance(part, Walked):
            yield from _paths(part, f"{prefix}{name}.")


def _is_child(value: Any) -> bool:
    """Return whether a value is an array, or stands for one, or is a pytree of a class that JAX knows."""
    kind = type(value)
    if kind in STATIC_TYPES or kind in (float, bool, dict, list, tuple):
        return False
    if isinstance(value, Tree):
        if kind not in _REGISTERED:
            register(kind)
        return True
    if kind is object:  # JAX's placeholder
        return True
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        numpy = sys.modules.get("numpy")
        return not (isinstance(value, type) or (numpy is not None and isinstance(value, numpy.generic)))
    return not (isinstance(value, tuple) or sys.modules["jax.tree_util"].all_leaves([value]))


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
