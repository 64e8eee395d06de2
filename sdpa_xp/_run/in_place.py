"""Elementwise operations on a tile, in the memory of the tile where its arrays lie in buffers.

A new array for each result would cost more time than the operation: see `buffers.py`. Every function here
takes the buffers of the call. If they are None, as in a library whose arrays cannot be written to, it returns a
new array. Otherwise `minus`, `plus` and `times` overwrite their first array, which must belong to the tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._libraries.protocols import Array, Namespace

if TYPE_CHECKING:
    from .buffers import CallBuffers


def minus(buffers: CallBuffers | None, array: Array, other: Array) -> Array:
    """Return array - other."""
    if not _fits(buffers, array, other):
        return array - other
    array -= other
    return array


def plus(buffers: CallBuffers | None, array: Array, other: Array) -> Array:
    """Return array + other."""
    if not _fits(buffers, array, other):
        return array + other
    array += other
    return array


def times(buffers: CallBuffers | None, array: Array, other: Array) -> Array:
    """Return array * other."""
    if not _fits(buffers, array, other):
        return array * other
    array *= other
    return array


def _fits(buffers: CallBuffers | None, array: Array, other: Array) -> bool:
    """Return whether `array` has the shape of the result: values may have a batch that scores do not have."""
    shape, last = other.shape, array.shape[-1]
    return buffers is not None and shape[:-1] == array.shape[:-1] and shape[-1] in (1, last)


def exp_minus(buffers: CallBuffers | None, xp: Namespace, s: Array, shift: Array) -> Array:
    """Return exp(s - shift)."""
    if buffers is None or not _fits(buffers, s, shift):
        return xp.exp(s - shift)
    s -= shift
    return buffers.functions.exp(s, out=s)
