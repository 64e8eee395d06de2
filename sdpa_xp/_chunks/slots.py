"""Masks and biases that are bound to a call, apart from their arrays, of which each task gets one block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from sdpa_xp._checks.numbers import Integers
from sdpa_xp._chunks.cutting import AlignedArray, Axis, aligned_axes
from sdpa_xp._core.dropout import Dropout
from sdpa_xp._core.scores import BoundOptions
from sdpa_xp._libraries import is_array, is_traced, namespace_of
from sdpa_xp._libraries.protocols import Array
from sdpa_xp.biases.algebra import Term
from sdpa_xp.masks.algebra import Pattern


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of an array in bound options."""

    index: int


def take_arrays(bound: BoundOptions) -> tuple[BoundOptions, list[AlignedArray]]:
    """Return the options with a slot for each array, and the arrays in the order of the slots."""
    arrays: list[AlignedArray] = []

    def take(array: Any, axes: tuple[Axis, ...]) -> Any:
        arrays.append(AlignedArray(array, axes))
        return Slot(len(arrays) - 1)

    with_slots: BoundOptions = _mapped(bound, is_array, take)
    return with_slots, arrays


def put_blocks(bound: BoundOptions, blocks: Sequence[Array]) -> BoundOptions:
    """Return the options with a block in each slot."""
    filled: BoundOptions = _mapped(bound, lambda x: isinstance(x, Slot), lambda slot, _: blocks[slot.index])
    return filled


def _mapped(
    value: Any,
    is_leaf: Callable[[Any], bool],
    change: Callable[[Any, tuple[Axis, ...]], Any],
    axes: tuple[Axis, ...] | None = None,
) -> Any:
    """Return `value` with each leaf changed.

    `axes` are those of a leaf, None if it broadcasts to the scores.
    """
    if is_leaf(value):
        ndim = getattr(value, "ndim", 0)
        return change(value, aligned_axes((), ndim) if axes is None else axes)
    if isinstance(value, Integers):
        values = _mapped(value.values, is_leaf, change)
        return _with_extremes(values) if is_array(values) else value._replace(values=values)
    if isinstance(value, tuple):
        changed = [_mapped(item, is_leaf, change) for item in value]
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    if isinstance(value, Pattern | Term | Dropout) and is_dataclass(value):
        array_axes: Mapping[str, tuple[Axis, ...]] = getattr(value, "array_axes", {})
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        changes = {name: _mapped(part, is_leaf, change, array_axes.get(name)) for name, part in parts.items()}
        return replace(value, **changes)
    return value


def _with_extremes(values: Array) -> Integers:
    """Return integers with their least and most, so that tiles of a block are skipped."""
    if is_traced(values) or 0 in values.shape:
        return Integers(values, float("-inf"), float("inf"))
    xp = namespace_of(values)
    return Integers(values, int(xp.min(values)), int(xp.max(values)))
