"""Dask: lazy arrays in chunks, whose values are computed later."""

from __future__ import annotations

from typing import Any

import array_api_compat as compat

from sdpa_xp._libraries.base import Library


class Dask(Library):
    """Arrays of Dask."""

    computes_on_demand = True

    def owns(self, array: object) -> bool:
        return bool(compat.is_dask_array(array))

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
