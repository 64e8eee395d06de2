"""The operators of values, by the functions of their array API that compute them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Protocol, TypeVar, cast


class HasNamespace(Protocol):
    """A graph, of which operators need the array API alone."""

    @property
    def namespace(self) -> ModuleType: ...


class HasGraph(Protocol):
    """A value, of which operators need the graph alone."""

    @property
    def graph(self) -> HasNamespace: ...


V = TypeVar("V", bound=HasGraph)


def unary(function: str) -> Callable[[V], V]:
    """Return an operator that calls a function of the value's array API."""

    def operator(value: V) -> V:
        return cast(V, getattr(value.graph.namespace, function)(value))

    return operator


def binary(function: str) -> Callable[[V, object], V]:
    """Return an operator with a right operand that calls a function of the value's array API."""

    def operator(value: V, other: object) -> V:
        return cast(V, getattr(value.graph.namespace, function)(value, other))

    return operator


def reflected(function: str) -> Callable[[V, object], V]:
    """Return an operator that has the value as its right operand."""

    def operator(value: V, other: object) -> V:
        return cast(V, getattr(value.graph.namespace, function)(other, value))

    return operator


def augmented(operator: str) -> Callable[[V, object], V]:
    """Return the augmented assignment of an operator, `x += y`: the result takes the name of the value."""

    def assign(value: V, other: object) -> V:
        return cast(V, value.graph.namespace.in_place_result(value, getattr(value, operator)(other)))

    return assign
