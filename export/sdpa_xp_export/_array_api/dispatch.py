"""Choose who computes: the graph if a value is among the arguments, else the library of the arrays."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import array_api_compat
import numpy as np

from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._graph.lengths import Length

P = ParamSpec("P")
T = TypeVar("T")


def array_function(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function of values a function of the namespace, whose arguments may also be other arrays.

    Without a value among the arguments, the function of that name in the arrays' own library is called.
    """

    @functools.wraps(function)
    def dispatched(*arguments: Any, **keywords: Any) -> Any:
        graph = graph_of(arguments)
        if graph is None:
            arrays = [leaf for leaf in _leaves(arguments) if is_array(leaf)]
            arrays = arrays or [np.asarray(leaf) for leaf in _leaves(arguments) if isinstance(leaf, np.generic)]
            namespace = array_api_compat.array_namespace(*arrays)
            return getattr(namespace, function.__name__)(*arguments, **keywords)
        compute: Callable[..., Any] = function
        return compute(*(_as_values(graph, argument) for argument in arguments), **keywords)

    return dispatched


def graph_of(arguments: Sequence[Any]) -> Graph | None:
    """Return the graph of the first value or length among arguments, and in lists of them."""
    graphs = (leaf.graph for leaf in _leaves(arguments) if isinstance(leaf, GraphValue | Length))
    return next((graph for graph in graphs if isinstance(graph, Graph)), None)


def is_array(operand: object) -> bool:
    """Return whether `operand` is an array of some library, and neither a number nor a value of a graph."""
    known = isinstance(operand, numbers.Number | GraphValue)
    return not known and bool(array_api_compat.is_array_api_obj(operand))


def _leaves(arguments: Sequence[Any]) -> Iterator[Any]:
    for argument in arguments:
        yield from _leaves(argument) if isinstance(argument, tuple | list) else (argument,)


def _as_values(graph: Graph, argument: Any) -> Any:
    if isinstance(argument, tuple | list):
        return type(argument)(_as_values(graph, element) for element in argument)
    if isinstance(argument, np.generic) and not isinstance(argument, float):  # an array of NumPy without axes
        return argument.item() if graph.mixes_kinds else graph.from_array(argument)
    return graph.from_array(argument) if is_array(argument) else argument
