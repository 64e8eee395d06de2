"""NumPy, which computes in threads of sdpa_xp, and array-api-strict, whose arrays wrap arrays of NumPy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, cast

from .base import ASTYPE, Diagonals, Library, has_repeats
from .protocols import AnyArray, Array, Device, Namespace

A = TypeVar("A")


class NumPy(Library):
    module = "numpy"
    diagonals = Diagonals()
    cast_code = ASTYPE
    uses_our_threads = keeps_buffers = writes_in_place = has_ufuncs = sets_elements = True

    def owns(self, array: object) -> bool:
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(array, (numpy.ndarray, numpy.generic))

    def namespace(self, _array: AnyArray) -> Namespace:
        # The import of array-api-compat's wrappers loads all of NumPy, and takes longer than NumPy's own.
        return cast(Namespace, sys.modules["numpy"])

    def device(self, _array: Any) -> Device:
        return "cpu"

    def is_writeable(self, array: Any) -> bool:
        return array.flags.writeable and not has_repeats(array.shape, array.strides, array.itemsize)

    def frozen(self, array: Any) -> Any:
        return array.copy()  # a read-only one too: its memory may belong to an array that is not

    def frozen_key(self, array: Any) -> object:
        return array.dtype.str, array.shape, array.tobytes()

    def is_traced(self, _array: Any) -> bool:
        return False

    def is_known(self, _length: object) -> bool:
        return True

    def context_maker(self, _array: Array) -> Callable[[], AbstractContextManager[object]]:
        return partial(sys.modules["numpy"].errstate, all="ignore")

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

    def from_numpy(self, array: Any, _xp: Any, _device: Device) -> Any:
        return array

    def in_rows(self, array: Any, axis: int) -> Any:
        size, step = array.itemsize, array.strides[axis]
        is_plain = array.strides[-1] == size and step >= size * array.shape[-1] and step % size == 0
        return array if is_plain and array.flags.aligned else array.copy(order="C")

    def halves_of_bytes(self, array: Any) -> Any:
        # 0.4 times the time of a stack, which writes every second byte. A product is faster than a shift.
        words = array.astype("<u2", order="C")
        words |= words * 16
        words &= 0x0F0F
        return words.view("u1")

    # Copies of rows in one operation, where the functions of the standard need two:

    def take_rows(self, array: Any, indices: Sequence[int]) -> Any:
        return array[[*indices]]  # numpy.take would copy all of a view first

    def take_tokens(self, array: Any, tokens: Any) -> Any:
        # `take` is faster, but copies all of a view first, such as values that are a part of their keys.
        return array.take(tokens, axis=-2) if array.flags.c_contiguous else array[..., tokens, :]

    def in_blocks(self, pool: Any, tables: Any) -> Any:
        (heads, size, width), xp = pool.shape[1:], sys.modules["numpy"]
        tables, every_head = xp.asarray(tables), xp.arange(heads)[:, None]
        blocks = tables[:, None, :]
        if pool.flags.c_contiguous:  # `take` copies each head of a block in one piece
            copied = pool.reshape(len(pool) * heads, size * width).take(blocks * heads + every_head, axis=0)
        else:
            copied = pool[blocks, every_head]
        return copied.reshape(len(tables), heads, tables.shape[1] * size, width)

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


NUMPY = NumPy()
STRICT = Strict()
