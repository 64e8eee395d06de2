"""Whose function computes: the graph's where a value is among the arguments, else the arrays' own library's."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import array_api_compat

from sdpa_xp_export._graph.graph import Graph
from sdpa_xp_export._graph.lengths import Length
from sdpa_xp_export._graph.value import Value


def of_values(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of values and of arrays beside them; of arrays alone, the one of their own library."""

    @functools.wraps(function)
    def either(*arguments: Any, **keywords: Any) -> Any:
        graph = graph_of(arguments)
        if graph is None:
            arrays = [each for each in _leaves(arguments) if is_array(each)]
            return getattr(array_api_compat.array_namespace(*arrays), name)(*arguments, **keywords)
        return function(*(_as_values(graph, each) for each in arguments), **keywords)

    return either


def graph_of(arguments: Sequence[Any]) -> Graph | None:
    """The graph of the first value or length among arguments, and in lists of them."""
    return next((each.graph for each in _leaves(arguments) if isinstance(each, Value | Length)), None)


def is_array(value: object) -> bool:
    """Whether `value` is an array of some library, and neither a number nor a value of a graph."""
    number = isinstance(value, numbers.Number | Value)
    return not number and bool(array_api_compat.is_array_api_obj(value))


def _leaves(arguments: Sequence[Any]) -> Iterator[Any]:
    for each in arguments:
        yield from _leaves(each) if isinstance(each, tuple | list) else (each,)


def _as_values(graph: Graph, given: Any) -> Any:
    if isinstance(given, tuple | list):
        return type(given)(_as_values(graph, each) for each in given)
    return graph.from_array(given) if is_array(given) else given
