"""The unique elements of arrays, and whether elements are among others.

How many elements are unique is known only when the graph runs. Each NaN is unique, since no NaN equals another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sdpa_xp_export._arrays.accumulation import cumulative_sum
from sdpa_xp_export._arrays.creation import as_value, places
from sdpa_xp_export._arrays.elementwise import equal, maximum, not_equal
from sdpa_xp_export._arrays.gathering import nonzero, take
from sdpa_xp_export._arrays.manipulation import concat, expand_dims, reshape
from sdpa_xp_export._arrays.operators import array_function, promoted
from sdpa_xp_export._arrays.ordering import argsort
from sdpa_xp_export._arrays.reductions import any
from sdpa_xp_export._graph.graph import GraphValue

__all__ = ["isin", "unique_all", "unique_counts", "unique_inverse", "unique_values"]


class UniqueAll(NamedTuple):
    """The unique elements, where each stands first, the place of each element among them, and their counts."""

    values: GraphValue
    indices: GraphValue
    inverse_indices: GraphValue
    counts: GraphValue


class UniqueCounts(NamedTuple):
    """The unique elements and their counts."""

    values: GraphValue
    counts: GraphValue


class UniqueInverse(NamedTuple):
    """The unique elements, and the place of each element among them."""

    values: GraphValue
    inverse_indices: GraphValue


@array_function
def unique_all(value: GraphValue) -> UniqueAll:
    """Return the unique elements in ascending order, with their first places, an inverse and counts."""
    flat = reshape(value, (-1,))
    order = argsort(flat.astype("uint8") if flat.elem_type == "bool" else flat)
    ordered = take(flat, order)
    steps = places(value.graph, flat.shape[0])
    begins = equal(steps, 0) | not_equal(ordered, take(ordered, maximum(steps - 1, 0, exact=False)))
    (starts,) = nonzero(begins)
    numbered = cumulative_sum(begins.astype("int64")) - 1
    ends = concat([starts[1:], reshape(as_value(value.graph, flat.shape[0]), (1,))])
    return UniqueAll(
        values=take(ordered, starts),
        indices=take(order, starts),
        inverse_indices=reshape(take(numbered, argsort(order)), value.shape),
        counts=ends[: starts.shape[0]] - starts,
    )


@array_function
def unique_counts(value: GraphValue) -> UniqueCounts:
    """Return the unique elements in ascending order, and how often each of them is there."""
    unique = unique_all(value)
    return UniqueCounts(unique.values, unique.counts)


@array_function
def unique_inverse(value: GraphValue) -> UniqueInverse:
    """Return the unique elements in ascending order, and the place of each element among them."""
    unique = unique_all(value)
    return UniqueInverse(unique.values, unique.inverse_indices)


@array_function
def unique_values(value: GraphValue) -> GraphValue:
    """Return the unique elements in ascending order."""
    return unique_all(value).values


@array_function
def isin(one: Any, other: Any, *, invert: bool = False) -> GraphValue:
    """Return whether each element of the first array is in the second one."""
    first, second = promoted("isin", one, other)
    is_in = any(equal(expand_dims(first, axis=-1), reshape(second, (-1,))), axis=-1)
    return ~is_in if invert else is_in
