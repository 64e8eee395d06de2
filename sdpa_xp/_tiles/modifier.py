"""What masks and biases have in common: small immutable values that compare by their arguments.

They and other options are trees, of which this has the arrays, and the same tree with other arrays. The
branches are tuples, and dataclasses that say along which axes of the scores the axes of their arrays lie, in
`array_axes`. These are masks and biases, and what they become when they are bound to a grid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from .._checks import Immutable, call_of
from .._checks.score_arrays import Integers
from .._libraries import is_array
from .._libraries.trees import Tree
from ..errors import PACKAGE

V = TypeVar("V")
PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
"""Two values of one of these types are interchangeable if they are equal."""
MOST_NUMBERS = 256
"""A modifier with a longer list is not kept in the cache of prepared calls, which would keep its arrays
alive."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScoreModifier(Tree, Immutable):
    """A mask or a bias. Its fields are the arguments of the public function that made it."""

    name: ClassVar[str] = ""
    """The function that made it, such as "causal" or "alibi", or the operator: "&", "|", "~" or "+"."""
    counts: ClassVar[Literal["slots", "distances", "positions"]] = "positions"
    """What it reads of a token: its place in the arrays, its distance from other tokens, or its position. In
    most calls they are the same, but not in a cache from which tokens were dropped."""
    ignores_heads: ClassVar[bool] = False
    """Whether it tells heads apart by the axis of an array alone, so that a graph may take them as batch
    entries."""
    array_axes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {}
    _caches: ClassVar[tuple[str, ...]] = ("_signature",)
    __array_ufunc__: ClassVar[None] = None  # so that in `array & mask` the mask decides, not the array
    _signature: tuple[object] | None = field(init=False, repr=False, compare=False, default=None)
    """`signature`, once it is known."""

    def arrays(self) -> Iterator[tuple[str, object]]:
        """Return the arrays among the arguments, by the names of these."""
        return ((leaf.argument, leaf.array) for leaf in leaves(self))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The values that an operator joined to this one."""
        return ()

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments by name. `name` and these arguments describe the value completely."""
        return {argument.name: getattr(self, argument.name) for argument in fields(self) if argument.repr}

    @property
    def signature(self) -> object:
        """A key by which calls are cached: equal for equal values, None for those that are not to be cached.

        Arrays may be written to between two calls, and the answer of a function may change.
        """
        try:
            known = self._signature
        except AttributeError:  # a caller's class without slots has no default for it
            known = None
        if known is None:
            known = (self._new_signature(),)
            # Frozen, but for what follows from its fields: threads that get here at once set equal tuples.
            object.__setattr__(self, "_signature", known)
        return known[0]

    def _new_signature(self) -> object:
        if self._has_class_of_caller():  # a caller's class may have more than its fields
            return None
        signature: list[object] = [type(self)]
        for _, argument in self._fields():
            items = argument if isinstance(argument, tuple) else (argument,)
            if len(items) > MOST_NUMBERS:
                return None
            for item in items:
                part = item.signature if isinstance(item, ScoreModifier) else (type(item), item)
                if part is None or not (isinstance(item, ScoreModifier) or type(item) in PLAIN_TYPES):
                    return None
                signature.append(part)
            signature.append(len(items) if isinstance(argument, tuple) else None)
        return tuple(signature)

    def _has_class_of_caller(self) -> bool:
        return not type(self).__module__.startswith(f"{PACKAGE}.")

    def has_code_of_caller(self) -> bool:
        """Return whether a function or a class of the caller takes part, which may read other arrays."""
        if self._has_class_of_caller():
            return True
        is_function = any(callable(argument) for _, argument in self._fields())
        return is_function or any(part.has_code_of_caller() for part in self.parts)

    def has_known_gradients(self) -> bool:
        """Return whether the derivatives of its arrays are known, and not only to the library of these."""
        return not self.has_code_of_caller() and all(part.has_known_gradients() for part in self.parts)

    def __repr__(self) -> str:
        return call_of(self, self.name)

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same mask or bias, of equal arguments."""
        return isinstance(other, ScoreModifier) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return type(self), *(
            self._key_of_array(argument) if is_array(argument) else argument for _, argument in self._fields()
        )

    def _key_of_array(self, array: Any) -> object:
        return id(array)

    def _fields(self) -> Iterator[tuple[str, object]]:
        return ((argument.name, getattr(self, argument.name)) for argument in fields(self) if argument.init)


class Leaf(NamedTuple):
    """An array of a tree."""

    array: Any
    holder: object
    """The value that holds it; of one in a tuple, what holds the tuple."""
    argument: str
    """The argument of `holder` that it is; "" is none."""


def leaves(tree: Any, holder: object = None, argument: str = "") -> Iterator[Leaf]:
    """Return the arrays of a tree, in the order in which `with_leaves` changes them."""
    if is_array(tree):
        yield Leaf(tree, holder, argument)
    elif isinstance(tree, tuple):
        for item in tree:
            yield from leaves(item, holder, argument)
    elif _is_branch(tree):
        for field in fields(tree):
            if field.init:
                yield from leaves(getattr(tree, field.name), tree, field.name)


def with_leaves(
    tree: Any,
    change: Callable[[Leaf], Any],
    is_leaf: Callable[[object], bool] = is_array,
    holder: object = None,
    argument: str = "",
) -> Any:
    """Return the same tree with each array, or other leaf, replaced by what `change` makes of it."""
    if is_leaf(tree):
        return change(Leaf(tree, holder, argument))
    if isinstance(tree, Integers):
        return tree.with_values(with_leaves(tree.values, change, is_leaf, holder, argument))
    if isinstance(tree, tuple):
        items = [with_leaves(item, change, is_leaf, holder, argument) for item in tree]
        # A NamedTuple takes its items one by one.
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if _is_branch(tree):
        parts = {field.name: getattr(tree, field.name) for field in fields(tree) if field.init}
        # `replace` computes the fields anew that follow from others.
        return replace(tree, **{name: with_leaves(x, change, is_leaf, tree, name) for name, x in parts.items()})
    return tree


def with_arrays(tree: V, change: Callable[[Any], Any]) -> V:
    """Return the same tree with each array replaced by `change(array)`."""
    changed: V = with_leaves(tree, lambda leaf: change(leaf.array))
    return changed


def _is_branch(value: Any) -> bool:
    return hasattr(type(value), "array_axes")


def loaded(package: str, name: str, files: Mapping[str, str]) -> object:
    """Return what a file of `package` defines as `name`, which is first used (PEP 562).

    `files` has the names of each file, in one text.
    """
    for file, names in files.items():
        if name in names.split():
            value = getattr(import_module(f"{package}.{file}"), name)
            setattr(sys.modules[package], name, value)
            return value
    raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
