"""Behaviour shared by all libraries with lazy, chunked arrays."""

from __future__ import annotations

import sys
from typing import Any

from sdpa_xp._libraries.base import Library


class LazyLibrary(Library):
    """Arrays without values until `compute()` is called."""

    computes_on_demand = True
    has_chunks = True

    def is_traced(self, array: Any) -> bool:
        del array
        return True

    def is_writeable(self, array: Any) -> bool:
        del array
        return False

    def to_cpu(self, array: Any) -> Any:
        return array.compute()

    def to_list(self, array: Any) -> Any:
        return array.compute().tolist()


def without_repeats(array: Any) -> Any:
    """Return a view of an array of NumPy with one element along each axis that only repeats, (..., 1, ...)."""
    return array[tuple(slice(1) if stride == 0 else slice(None) for stride in array.strides)]


def own_copy(array: Any) -> Any:
    """Return a copy of an array of NumPy, so that a caller may write to theirs before values are computed.

    What repeats is not written out: a row that is broadcast to L x S stays as small as a row.
    """
    distinct = without_repeats(array).copy()
    return (
        distinct if distinct.shape == array.shape else sys.modules["numpy"].broadcast_to(distinct, array.shape)
    )
