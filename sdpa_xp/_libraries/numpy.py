"""NumPy, which computes in threads of sdpa_xp, and array-api-strict, whose arrays wrap arrays of NumPy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, cast

from sdpa_xp._libraries.base import ASTYPE, Library, has_repeats
from sdpa_xp._libraries.capabilities import Diagonals
from sdpa_xp._libraries.protocols import AnyArray, Array, Device, Namespace, Ufuncs

A = TypeVar("A")


class NumPy(Library):
    """Arrays of NumPy."""

    module = "numpy"
    diagonals = Diagonals()
    cast_code = ASTYPE
    uses_our_threads = keeps_buffers = True

    @property
    def ufuncs(self) -> Ufuncs | None:
        return cast(Ufuncs, sys.modules["numpy"])

    def owns(self, array: object) -> bool:
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(array, (numpy.ndarray, numpy.generic))

    def namespace(self, array: AnyArray) -> Namespace:
        del array
        # The import of array-api-compat's wrappers loads all of NumPy, and takes longer than NumPy's own.
        return cast(Namespace, sys.modules["numpy"])

    def device(self, array: Any) -> Device:
        del array
        return "cpu"

    def is_writeable(self, array: Any) -> bool:
        return array.flags.writeable and not has_repeats(array.shape, array.strides, array.itemsize)

    def frozen(self, array: Any) -> Any:
        return array.copy()  # a read-only one too: its memory may belong to an array that is not

    def frozen_key(self, array: Any) -> object:
        return array.dtype.str, array.shape, array.tobytes()

    def is_traced(self, array: Any) -> bool:
        del array
        return False

    def context_maker(self, array: Array) -> Callable[[], AbstractContextManager[object]]:
        del array
        return partial(sys.modules["numpy"].errstate, all="ignore")

    def rows_at(self, array: Any, indices: Sequence[int]) -> Any:
        return array[[*indices]]  # numpy.take would copy all of a view first

    def rows_in_blocks(self, pool: Any, tables: Any) -> Any:
        # One copy, where the standard's functions need two.
        numpy, (heads, size, width) = sys.modules["numpy"], pool.shape[1:]
        tables, every_head = numpy.asarray(tables), numpy.arange(heads)[:, None]
        blocks = tables[:, None, :]
        if pool.flags.c_contiguous:  # `take` copies each head of a block in one piece
            copied = pool.reshape(len(pool) * heads, size * width).take(blocks * heads + every_head, axis=0)
        else:
            copied = pool[blocks, every_head]
        return copied.reshape(len(tables), heads, tables.shape[1] * size, width)

    def results_are_writeable(self, arrays: Sequence[Array]) -> bool:
        del arrays
        return True

    def array_signature(self, array: Any) -> object:
        return (array.shape, array.dtype) if type(array) is sys.modules["numpy"].ndarray else None

    def unsupported_reason(self, array: Any) -> str:
        numpy = sys.modules["numpy"]
        if type(array) is numpy.ndarray:  # first, since `numpy.ma` is imported when it is first named
            return ""
        if isinstance(array, numpy.ma.MaskedArray):
            return "Its own mask would be ignored: pass `.data`, and an `attn_mask` of what may attend."
        if isinstance(array, numpy.matrix):
            return "Its `*` is a matrix product: pass numpy.asarray(...) of it."
        hooks = ("__array_ufunc__", "__array_function__")  # arrays with units or masks define them
        if isinstance(array, numpy.generic):
            return "A scalar is not an array: pass numpy.asarray(...) of it."
        if any(getattr(type(array), hook) is not getattr(numpy.ndarray, hook) for hook in hooks):
            return "Its class changes what operations mean: pass numpy.asarray(...) of it."
        return ""

    def base_form(self, array: A) -> A:
        numpy = sys.modules["numpy"]
        return array if type(array) is numpy.ndarray else cast(A, numpy.asarray(array))

    def to_numpy(self, array: Any) -> Any:
        return array

    def from_numpy(self, array: Any, xp: Any, device: Device) -> Any:
        del xp, device
        return array

    def addresses(self, array: Any) -> Any:
        return array


class Strict(Library):
    """Arrays of array-api-strict, the standard and nothing else. Each wraps an array of NumPy, `_array`."""

    def owns(self, array: object) -> bool:
        strict = sys.modules.get("array_api_strict")
        return strict is not None and isinstance(array, strict._array_object.Array)

    def is_accelerator(self, device: Any) -> bool:
        return bool(device != sys.modules["array_api_strict"].Device("CPU_DEVICE"))

    def values_at_hand(self, array: Any) -> Any:
        return array  # its devices are names

    def to_cpu(self, array: Any) -> Any:
        return array.to_device(sys.modules["array_api_strict"].Device("CPU_DEVICE"))

    def is_writeable(self, array: Any) -> bool:
        memory = array._array
        return memory.flags.writeable and not has_repeats(memory.shape, memory.strides, memory.itemsize)

    def addresses(self, array: Any) -> Any:
        return array._array
