"""A layer with other arrays: the values of a graph, or the same numbers in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

from sdpa_xp_export._array_api.dispatch import is_array


def arrays_of(layer: object) -> dict[str, Any]:
    """The parameters of a layer, of the layer that a method is of, or of what a `functools.partial` calls."""
    if isinstance(layer, partial):
        return arrays_of(layer.func)
    parameters = getattr(getattr(layer, "__self__", layer), "parameters", None)
    if not isinstance(parameters, Mapping):
        return {}
    return {name: array for name, array in parameters.items() if is_array(array)}


def replaced(layer: Callable[..., Any], change: Callable[[str, Any], Any]) -> Callable[..., Any]:
    """`layer`, each of whose parameters is what `change` makes of its name and array.

    That is for a layer like those of `sdpa_xp.layers`, with `parameters` and `with_parameters`, and for its
    methods; any other function stays as it is.
    """
    if isinstance(layer, partial):
        return partial(replaced(layer.func, change), *layer.args, **layer.keywords)
    if isinstance(layer, MethodType):
        found: Callable[..., Any] = MethodType(layer.__func__, replaced(layer.__self__, change))  # type: ignore[arg-type]
        return found
    with_parameters, arrays = getattr(layer, "with_parameters", None), arrays_of(layer)
    if with_parameters is None or not arrays:
        return layer
    changed: Callable[..., Any] = with_parameters({name: change(name, x) for name, x in arrays.items()})
    return changed
