"""Options as trees: their arrays, and the same options with other arrays.

The branches are tuples, and dataclasses that say along which axes of the scores the axes of their arrays lie:
`array_axes`. These are masks and biases, and what they become when they are bound to a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

from .._checks.integers import Integers
from .._libraries import is_array

V = TypeVar("V")


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
