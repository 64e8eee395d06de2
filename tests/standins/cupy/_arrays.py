"""Arrays whose elements the host reads only where it asks for them, which is counted as a wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from standins import counts

from cupy import _rules
from cupy.cuda import Device, runtime

CPU, CUDA = 1, 2
"""Types of devices in DLPack."""


class ndarray:  # noqa: N801
    """An array on a device. There are no scalars: a reduction to one number is an array, too."""

    __slots__ = ("__weakref__", "_number", "_values")
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]
    _values: np.ndarray
    """The elements, in the memory of the host."""
    _number: int
    """The number of the device."""

    shape = property(lambda self: self._values.shape)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    dtype = property(lambda self: self._values.dtype)
    strides = property(lambda self: self._values.strides)
    itemsize = property(lambda self: self._values.itemsize)
    nbytes = property(lambda self: self._values.nbytes)
    flags = property(lambda self: SimpleNamespace(c_contiguous=self._values.flags.c_contiguous))
    device = property(lambda self: Device(self._number))
    data = property(lambda self: SimpleNamespace(ptr=self._values.ctypes.data, device_id=self._number))
    T = property(lambda self: self._view(self._values.T))

    def _view(self, values: np.ndarray) -> ndarray:
        """Return an array on the same device; its memory can be written to, as everywhere in CuPy."""
        return _array(values, self._number)

    def _read(self, what: str) -> np.ndarray:
        """Return the elements to the host, which waits for them."""
        counts.wait(what)
        return self._values

    def get(self) -> np.ndarray:
        return self._read("get").copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return wrapped, (self._read("pickle"),)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[n] for n in range(len(self)))

    def __getitem__(self, index: Any) -> ndarray:
        entries, arrays = _index(index)
        if arrays:
            on_device("cupy_take", self, *arrays)
            return wrapped(np.asarray(self._values[entries]))
        values = self._values[entries]
        return self._view(values if isinstance(values, np.ndarray) else self._values[(*entries, ...)])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        entries, arrays = _index(index)
        on_device("cupy_copy", *(x for x in (self, *arrays, value) if isinstance(x, ndarray)))
        with np.errstate(all="ignore"):
            self._values[entries] = value._values if isinstance(value, ndarray) else value

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        on_device("cupy_copy", self)
        with np.errstate(all="ignore"):
            return wrapped(self._values.astype(dtype))

    def copy(self) -> ndarray:
        """Return a copy on the current device, also from another one."""
        counts.launch("cupy_copy")
        return wrapped(self._values.copy())

    def __deepcopy__(self, memo: Any) -> ndarray:
        with self.device:
            return self.copy()

    def take(self, indices: Any, axis: Any = None) -> ndarray:
        (index,), arrays = _index(indices)
        on_device("cupy_take", self, *arrays)
        return wrapped(self._values.take(index, axis))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        return _function(ufunc.__name__)(*inputs, **keywords) if method == "__call__" else NotImplemented

    def __array_function__(self, function: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        return _function(function.__name__)(*arguments, **keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._number

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if dl_device == (CPU, 0) and copy is not False:
            return self._read("dlpack").copy().__dlpack__(max_version=max_version)
        raise BufferError("a library on the CPU cannot read memory of a device")


def wrapped(values: np.ndarray) -> ndarray:
    """Return an array on the current device."""
    return _array(values, runtime.getDevice())


def _array(values: np.ndarray, number: int) -> ndarray:
    array = object.__new__(ndarray)
    array._values, array._number = values, number
    return array


def on_device(kernel: str, *arrays: ndarray) -> None:
    """Count a launch. A kernel reads and writes arrays of the current device, and nothing else."""
    current = runtime.getDevice()
    for array in arrays:
        if not isinstance(array, ndarray):
            raise TypeError(f"Argument has incorrect type (expected cupy.ndarray, got {type(array)})")
        if array._number != current:
            place = f"The device where the array resides ({array._number}) is different from the current device"
            raise ValueError(f"{place} ({current}). Peer access is unavailable between these devices.")
    counts.launch(kernel)


def _index(index: Any) -> tuple[tuple[Any, ...], list[ndarray]]:
    """Return an index for NumPy, and its arrays. Lists are copied to the device; masks make the host wait."""
    entries, arrays = [*index] if isinstance(index, tuple) else [index], []
    for place, entry in enumerate(entries):
        if isinstance(entry, list | np.ndarray):
            counts.copy("index")
            entry = wrapped(np.asarray(entry))
        if isinstance(entry, ndarray):
            if entry.dtype == np.bool_:
                counts.wait("boolean index")
            arrays.append(entry)
            entries[place] = entry._values
    return tuple(entries), arrays


def _function(name: str) -> Callable[..., Any]:
    import cupy

    return getattr(cupy, name)  # type: ignore[no-any-return]


def _reading(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: getattr(self._read(name), name)(*arguments)


def _viewing(name: str) -> Callable[..., Any]:
    return lambda self, *arguments, **options: self._view(getattr(self._values, name)(*arguments, **options))


def _reducing(name: str) -> Callable[..., Any]:
    def reduced(self: ndarray, axis: Any = None, keepdims: bool = False) -> ndarray:
        on_device(f"cupy_{name}", self)
        is_half = self.dtype.itemsize == 2 and self.dtype.kind in "fV"
        values = self._values.astype(np.float32) if is_half else self._values  # CuPy sums halves in float32
        with np.errstate(all="ignore"):
            result = np.asarray(getattr(np, name)(values, axis=axis, keepdims=keepdims))
        return wrapped(result.astype(self.dtype if is_half and result.dtype != bool else result.dtype))

    return reduced


def _operating(name: str) -> Callable[..., Any]:
    def operate(self: ndarray, *others: Any) -> Any:
        if not all(isinstance(x, ndarray | np.generic | np.ndarray | int | float | complex) for x in others):
            return NotImplemented
        return _function(name)(self, *others)

    return operate


def _add_methods() -> None:
    methods = {name: _reading(name) for name in ("tolist", "item")}
    methods |= {name: _viewing(name) for name in ("reshape", "transpose", "swapaxes", "squeeze", "view")}
    methods |= {name: _reducing(name) for name in ("sum", "max", "min", "any", "all")}
    methods |= {name: getattr(ndarray, name) for name in ("get", "astype", "copy", "take")}
    for name, method in methods.items():
        setattr(ndarray, name, _rules.checked(f"ndarray.{name}", method))
    for name in ("bool", "int", "float", "complex", "repr", "str", "format"):
        setattr(ndarray, f"__{name}__", _reading(f"__{name}__"))
    unary = (
        "neg negative pos positive abs absolute invert invert lt less le less_equal gt greater ge greater_equal"
    )
    words = f"{unary} eq equal ne not_equal".split()
    for short, name in zip(words[::2], words[1::2], strict=True):
        setattr(ndarray, f"__{short}__", _operating(name))
    binary = (
        "add add sub subtract mul multiply truediv true_divide floordiv floor_divide mod remainder pow power"
    )
    words = (
        f"{binary} lshift left_shift rshift right_shift and bitwise_and or bitwise_or xor bitwise_xor".split()
    )
    for short, name in zip([*words[::2], "matmul"], [*words[1::2], "matmul"], strict=True):
        setattr(ndarray, f"__{short}__", _operating(name))
        setattr(ndarray, f"__r{short}__", lambda self, other, name=name: _function(name)(other, self))
        if short != "matmul":
            setattr(ndarray, f"__i{short}__", lambda self, other, name=name: _function(name)(self, other, self))


_add_methods()
