"""CuPy: arrays on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import array_api_compat as compat

from sdpa_xp._libraries.addresses import Addresses
from sdpa_xp._libraries.base import Library
from sdpa_xp._libraries.protocols import Array, Device


class CuPy(Library):
    """Arrays of CuPy."""

    name = "cupy"
    rng_name = "cupy.random.Generator"
    module = "cupy"
    conversion = "cupy.asarray"
    multiplies_halves = exchanges_memory = has_astype = sets_elements = True

    def owns(self, array: object) -> bool:
        return bool(compat.is_cupy_array(array))

    def is_traced(self, array: Any) -> bool:
        del array
        return False

    def is_accelerator(self, device: Device) -> bool:
        del device
        return True

    def to_cpu(self, array: Any) -> Any:
        return array.get()

    def to_list(self, array: Any) -> Any:
        return array.tolist()

    def addresses(self, array: Any) -> Any:
        return Addresses(array.data.ptr, array.shape, array.strides, array.itemsize).as_array()

    def quiet(self, array: Array) -> Callable[[], AbstractContextManager[object]]:
        del array
        return nullcontext

    def is_rng(self, rng: object) -> bool:
        return isinstance(rng, sys.modules["cupy"].random.Generator)

    def random_words(self, rng: Any, count: int, array: Array) -> Array:
        del array
        words: Array = rng.integers(-(2**31), 2**31 - 1, size=count, dtype="int32")
        return words
