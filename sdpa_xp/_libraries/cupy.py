"""CuPy: arrays on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import array_api_compat as compat

from .base import ASTYPE, Generators, Library, at_addresses, has_repeats
from .protocols import Array, Device, Dtype


class CuPyGenerators(Generators):
    """cupy.random.Generator, each on a device of its own."""

    name = "cupy.random.Generator"

    def owns(self, rng: object) -> bool:
        return isinstance(rng, sys.modules["cupy"].random.Generator)

    def state(self, _rng: Any) -> Any:
        return None  # its state is on the device, and has no public name

    def random_words(self, rng: Any, count: int, _xp: Any, _device: Device) -> Array:
        with _device_of(rng):
            words = rng.integers(-(2**31), 2**31 - 1, size=count, dtype="int32")
        return cast(Array, sys.modules["cupy"].asarray(words))  # on the current device

    def uniform(self, rng: Any, count: int, xp: Any) -> Array:
        with _device_of(rng):
            return super().uniform(rng, count, xp)


class CuPy(Library):
    name = "cupy"
    cast_code = ASTYPE
    generators = CuPyGenerators()
    module = "cupy"
    conversion = "cupy.asarray"
    multiplies_halves = sets_elements = True
    # With more than two axes CuPy 14 and 15 refuse bfloat16, multiply float16 in float32, and copy the matrix
    # (`matmul` in _routines_linalg.pyx). Two axes are one call of cuBLAS, which has tensor cores for halves.
    flattens_products = True
    needs_context = True

    def owns(self, array: object) -> bool:
        return bool(compat.is_cupy_array(array))

    def is_traced(self, _array: Any) -> bool:
        return False

    def is_accelerator(self, _device: Device) -> bool:
        return True

    def sharing(self) -> tuple[object, AbstractContextManager[object]]:
        stream = sys.modules["cupy"].cuda.get_current_stream()  # where a copy of a list waits for its turn
        return stream.ptr, nullcontext()

    def takes_cuda(self) -> bool:
        return True

    def bfloat16(self, _xp: Any) -> Dtype | None:
        module: Any = sys.modules.get("ml_dtypes")  # CuPy imports it if it is installed
        return None if module is None else sys.modules["numpy"].dtype(module.bfloat16)

    def is_writeable(self, array: Any) -> bool:
        return not has_repeats(array.shape, array.strides, array.itemsize)  # no array of CuPy is read-only

    def frozen(self, array: Any) -> Any:
        with array.device:
            return array.copy()

    def to_cpu(self, array: Any) -> Any:
        return array.get()

    def addresses(self, array: Any) -> Any:
        return at_addresses(array.data.ptr, array.shape, array.strides, array.itemsize)

    def context_maker(self, array: Any) -> Callable[[], AbstractContextManager[object]]:
        # CuPy computes on the current device, and array-api-compat ignores `device` in all but `asarray`.
        return partial(sys.modules["cupy"].cuda.Device, array.device.id)


def _device_of(rng: Any) -> AbstractContextManager[object]:
    """Return a context on the device of a generator, which draws on no other one."""
    # A private name of CuPy 9 to 15. If it goes, CuPy raises an error for a generator on another device.
    number = getattr(rng.bit_generator, "_current_device_id", None)
    return cast(AbstractContextManager[object], sys.modules["cupy"].cuda.Device(number))


CUPY = CuPy()
