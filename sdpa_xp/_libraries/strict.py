"""array-api-strict: the standard and nothing else."""

from __future__ import annotations

import sys
from typing import Any

from sdpa_xp._libraries.addresses import has_repeats
from sdpa_xp._libraries.base import Library


class Strict(Library):
    """Arrays of array-api-strict."""

    def owns(self, array: object) -> bool:
        strict = sys.modules.get("array_api_strict")
        return strict is not None and isinstance(array, strict._array_object.Array)

    def is_accelerator(self, device: Any) -> bool:
        return bool(device != sys.modules["array_api_strict"].Device("CPU_DEVICE"))

    def values_at_hand(self, array: Any) -> Any:
        return array  # its devices are names

    def is_writeable(self, array: Any) -> bool:
        memory = array._array  # an array of NumPy
        return memory.flags.writeable and not has_repeats(memory.shape, memory.strides, memory.itemsize)

    def addresses(self, array: Any) -> Any:
        return array._array
