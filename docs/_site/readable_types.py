"""Annotations as the reference shows them: an array is `Array`, whatever a type checker calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from griffe import (
    Alias,
    Attribute,
    Expr,
    ExprBinOp,
    ExprName,
    ExprSubscript,
    Extension,
    Function,
    GriffeLoader,
    Module,
    Object,
)
from internals import PLACES

SHOWN_AS = {"A": "Array", "AnyArray": "Array", "Layout": "Layout"}
"""`A` is the type variable for the array type of the query, `AnyArray` the protocol of any array."""
READABLE = Module("readable")
READABLE["Array"] = Alias("Array", PLACES["AnyArray"].replace(":", "."))
READABLE["Layout"] = Alias("Layout", PLACES["Layout"].replace(":", "."))


class ReadableTypes(Extension):
    """Rename the types of arrays, drop what only a type checker needs, and show defaults by their value."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_: Any) -> None:
        for member in _objects(pkg):
            if isinstance(member, Function):
                for parameter in member.parameters:
                    parameter.annotation = _without_default(readable(parameter.annotation), parameter.default)
                    parameter.default = _value(parameter.default, loader)
                member.returns = readable(member.returns)
            elif isinstance(member, Attribute):
                member.annotation = readable(member.annotation)
                member.value = readable(member.value)


def _objects(parent: Object) -> Iterator[Object]:
    """Yield every object that a package defines, however deep; names that it imports are left out."""
    for member in parent.members.values():
        if isinstance(member, Object):
            yield member
            yield from _objects(member)


def readable(annotation: str | Expr | None) -> str | Expr | None:
    """Replace names in place, since a dataclass shares them with its parameters; return the annotation."""
    if isinstance(annotation, ExprSubscript) and str(annotation.left) == "Unpack":
        return readable(annotation.slice)
    if isinstance(annotation, Expr):
        for name in annotation.iterate(flat=True):
            if isinstance(name, ExprName) and name.name in SHOWN_AS:
                name.name, name.parent = SHOWN_AS[name.name], READABLE
    return annotation


def _without_default(annotation: str | Expr | None, default: str | Expr | None) -> str | Expr | None:
    """Leave out a None that the signature shows as the default."""
    is_optional = isinstance(annotation, ExprBinOp) and str(annotation.right) == str(default) == "None"
    return annotation.left if is_optional else annotation


def _value(default: str | Expr | None, loader: GriffeLoader) -> str | Expr | None:
    """Return the value of a default that names a constant; return other defaults unchanged."""
    if not isinstance(default, ExprName):
        return default
    try:
        constant = loader.modules_collection[default.canonical_path]
    except KeyError:  # a builtin, or the name of another package
        return default
    return constant.value if isinstance(constant, Attribute) and constant.value else default
