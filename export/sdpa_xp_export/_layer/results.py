"""What a layer returns: arrays by name, the outputs of a graph, in a structure that `jit` makes again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from sdpa_xp import AttentionStatistics

from .._arrays.dispatch import is_array
from .._call.statistics import as_statistics, by_name
from .._graph import FloatOfLengths, GraphValue, Length
from .._packages import package_of

Structure: TypeAlias = tuple[Mapping[Any, Any], Callable[[Iterable[Any]], Any]]
"""The parts of a structure by name, and what makes a structure of other parts."""
Put: TypeAlias = Callable[[Any, Any, Any], None]
Maker: TypeAlias = Callable[[Iterator[Any]], Any]


def named_outputs(result: Any) -> dict[Any, Any]:
    """Return `outputs_of` a layer's result as a dictionary."""
    return dict(outputs_of(result))


def outputs_of(result: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the arrays and numbers that a layer returned, with their names; None and text are no outputs.

    A mapping, a NamedTuple and a dataclass have names; else they are `output`, or `output_0` and on. Names of
    structures within others are joined by `_`. Statistics have the names of those that were asked for; top keys
    are `top_weights` and `top_indices`.
    """
    return _outputs("output", result, is_named=False)


def _outputs(name: Any, result: Any, *, is_named: bool) -> Iterator[tuple[Any, Any]]:
    structure = _structure(result)
    if structure is None:
        if result is not None and not isinstance(result, str | bytes):
            yield name, result
        return
    is_sequence = isinstance(result, tuple | list) and not hasattr(result, "_fields")
    for key, part in structure[0].items():
        yield from _outputs(f"{name}_{key}" if is_named or is_sequence else key, part, is_named=True)


def as_returned(result: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that returns arrays as the layer returned `result`; what is no array stays as it is."""
    make = _maker(result)
    return lambda arrays: make(iter(arrays))


def is_output(part: object) -> bool:
    """Return whether a part of a result is computed by the graph."""
    return isinstance(part, GraphValue | Length | FloatOfLengths) or is_array(part)


def _maker(result: Any) -> Maker:
    structure = _structure(result)
    if structure is not None:
        makers, make = [_maker(part) for part in structure[0].values()], structure[1]
        return lambda arrays: make([maker(arrays) for maker in makers])
    if isinstance(result, Length | FloatOfLengths):
        number = int if isinstance(result, Length) else float
        return lambda arrays: number(next(arrays))
    return next if is_output(result) else lambda _: result


def _structure(result: Any) -> Structure | None:
    """Return the parts of a structure; None for an array and for what else has no parts."""
    kind: Any = type(result)
    if isinstance(result, AttentionStatistics):
        named = by_name(result)
        return named, lambda parts: as_statistics(dict(zip(named, parts, strict=True)))
    if isinstance(result, Mapping):
        keys = [*result]
        if isinstance(result, dict) and kind is not dict:  # another kind of dictionary, with what it has beside
            return result, partial(_refilled, _emptied(result, keys, dict.__setitem__), keys, dict.__setitem__)
        return result, lambda parts: dict(zip(keys, parts, strict=True))
    if kind in (tuple, list) or hasattr(result, "_make"):
        names = getattr(result, "_fields", range(len(result)))
        return dict(zip(names, result, strict=True)), getattr(kind, "_make", kind)
    if dataclasses.is_dataclass(result) and package_of(kind) not in ("sdpa_xp", "sdpa_xp_export"):
        names = [field.name for field in dataclasses.fields(result)]
        named = {name: getattr(result, name) for name in names}
        return named, partial(_refilled, _emptied(result, names, object.__setattr__), names, object.__setattr__)
    return None


def _emptied(result: Any, names: Sequence[Any], put: Put) -> Any:
    """Return a copy of a structure without its parts: values of a graph would keep the graph."""
    return _refilled(result, names, put, [None] * len(names))


def _refilled(structure: Any, names: Sequence[Any], put: Put, parts: Iterable[Any]) -> Any:
    """Return a copy of a structure with other parts, which is made without a call of its class."""
    copied = copy.copy(structure)
    for name, part in zip(names, parts, strict=True):
        put(copied, name, part)
    return copied
