"""Behaviour shared by all libraries with lazy, chunked arrays."""

from __future__ import annotations

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
