"""What JAX does with a `Tree`: a pytree, whose arrays are the leaves, and all else is static.

Objects are taken apart by their attributes and put together without `__init__`, since JAX also puts tracers,
axes and placeholders where arrays were.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, cast

from ..errors import PACKAGE
from .trees import REGISTERED, WAITING, Tree, register

Token: TypeAlias = object
"""What stands for a value in the static part: `CHILD`, a `Walked`, a `Static`, or a value of a static type."""
STATIC_TYPES = frozenset({type(None), int, str})
"""The types whose values are equal to no value of another type that stands in a static part."""


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


def register_all() -> None:
    """Register the classes of the library, and those of which there are objects."""
    WAITING.update({*_own_classes(Tree)} - REGISTERED)
    register_waiting()


def register_waiting() -> None:
    """Register the classes of which there are objects."""
    for kind in WAITING.copy():  # another thread may add a class meanwhile
        REGISTERED.add(kind)
        WAITING.discard(kind)
        functions = (_flatten_with_keys, _flatten) if issubclass(kind, Tree) else (_as_static, _as_static)
        with suppress(ValueError):  # its author has registered it
            sys.modules["jax.tree_util"].register_pytree_with_keys(kind, functions[0], _unflatten, functions[1])


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
        if kind not in REGISTERED:
            register(kind)
        return True
    if kind is object:  # JAX's placeholder
        return True
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        numpy = sys.modules.get("numpy")
        return not (isinstance(value, type) or (numpy is not None and isinstance(value, numpy.generic)))
    return not (isinstance(value, tuple) or sys.modules["jax.tree_util"].all_leaves([value]))
