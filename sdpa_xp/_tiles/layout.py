"""The order of the axes of the caller's arrays."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from sdpa_xp._checks.shapes import HLE
from sdpa_xp._libraries.protocols import Array, Namespace

Layout: TypeAlias = Literal["...HLE", "...LHE"]
"""Heads before the length, or after it."""


def slice_of_axis(axis: int, start: int, stop: int) -> tuple[Any, ...]:
    """Return the index of `start` to `stop` on one axis, counted from the last (-1)."""
    return (..., slice(start, stop), *[slice(None)] * (-1 - axis))


def swap_heads_and_length(xp: Namespace, array: Array, layout: str) -> Array:
    """Convert (..., L, H, E) to (..., H, L, E), or back, as a view; in the layout "...HLE" nothing is to do."""
    if layout == HLE or array.ndim < 3:
        return array
    *batch, heads, length, width = range(array.ndim)
    return xp.permute_dims(array, (*batch, length, heads, width))
