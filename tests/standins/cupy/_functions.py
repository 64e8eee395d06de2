"""The functions of CuPy that sdpa_xp and array-api-compat call, computed by NumPy."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from standins import counts

from cupy import _rules
from cupy._arrays import CPU, ndarray, on_device, wrapped
from cupy._ufuncs import ufunc
from cupy.cuda import Device

_where = ufunc("where", np.where)


def asarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, copy=False)


def array(obj: Any, dtype: Any = None, copy: bool = True) -> ndarray:
    if isinstance(obj, ndarray):
        here = obj if obj.device == Device() else obj.copy()
        return here.astype(obj.dtype if dtype is None else dtype, copy=copy)
    values = np.array(_on_host(obj), dtype=dtype)
    if values.dtype.kind == "O":
        raise ValueError("Unsupported dtype object")
    counts.copy(f"array of shape {values.shape}")
    return wrapped(values)


def _on_host(numbers: Any) -> Any:
    """Return lists in which arrays are replaced by their numbers: CuPy stacks these on the device."""
    if isinstance(numbers, ndarray):
        return numbers._values
    return [_on_host(x) for x in numbers] if isinstance(numbers, list | tuple) else numbers


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    on_device("cupy_arange")
    return wrapped(np.arange(start, stop, step, dtype) if stop is not None else np.arange(start, dtype=dtype))


def empty(shape: Any, dtype: Any = float) -> ndarray:
    values = np.empty(shape, dtype)
    if values.dtype.kind in "fV":
        values.fill(np.nan)  # what reads memory before it is written to sees it
    return wrapped(values)


def full(shape: Any, fill_value: Any, dtype: Any = None) -> ndarray:
    on_device("cupy_fill", *([fill_value] if isinstance(fill_value, ndarray) else []))
    return wrapped(np.full(shape, _on_host(fill_value), dtype))


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def full_like(a: ndarray, fill_value: Any, dtype: Any = None) -> ndarray:
    return full(a.shape, fill_value, a.dtype if dtype is None else dtype)


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return full_like(a, 0, dtype)


def ones_like(a: ndarray, dtype: Any = None) -> ndarray:
    return full_like(a, 1, dtype)


def from_dlpack(array: Any) -> ndarray:
    if array.__dlpack_device__()[0] == CPU:
        raise TypeError(
            "CPU arrays cannot be directly imported to CuPy. Use `cupy.array(numpy.from_dlpack(input))`"
        )
    return array.view()  # type: ignore[no-any-return]


def broadcast_to(array: ndarray, shape: Any) -> ndarray:
    """Return a view with strides of 0, which can be written to."""
    strides = np.broadcast_to(array._values, shape).strides
    return array._view(np.lib.stride_tricks.as_strided(array._values, shape, strides))


def broadcast_arrays(*args: ndarray) -> list[ndarray]:
    shape = np.broadcast_shapes(*(x.shape for x in args))
    return [broadcast_to(x, shape) for x in args]


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    return _where(condition.astype("?", copy=False), x, y)  # type: ignore[no-any-return]


def concatenate(tup: Sequence[ndarray], axis: int = 0) -> ndarray:
    on_device("cupy_concatenate", *tup)
    return wrapped(np.concatenate([x._values for x in tup], axis))


def stack(tup: Sequence[ndarray], axis: int = 0) -> ndarray:
    on_device("cupy_stack", *tup)
    return wrapped(np.stack([x._values for x in tup], axis))


def matmul(first: ndarray, second: ndarray) -> ndarray:
    """Multiply: two axes in any dtype, as gemmEx does, and more in all but bfloat16."""
    on_device("matmul", first, second)
    if 0 in (first.ndim, second.ndim):
        raise ValueError("Scalar operands are not allowed, use '*' instead")
    dtype, is_empty = np.promote_types(first.dtype, second.dtype), 0 in (first.size, second.size)
    if dtype == ml_dtypes.bfloat16 and builtins.max(first.ndim, second.ndim) > 2 and not is_empty:
        # A kernel for integers is looked up by the dtype's character: _routines_linalg.pyx of 14.2 and 15.0.
        raise TypeError("data type 'E' not understood")
    wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
    if builtins.max(first.ndim, second.ndim) > 2:  # operands and result are copied if cuBLAS cannot take them
        copied = [dtype != wide, *(x.dtype != wide or not x.flags.c_contiguous for x in (first, second))]
        for _ in range(builtins.sum(copied)):
            counts.launch("cupy_copy")
    with np.errstate(all="ignore"):
        return wrapped(np.asarray(first._values.astype(wide) @ second._values.astype(wide)).astype(dtype))


def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    return np.result_type(*(x.dtype if isinstance(x, ndarray) else x for x in arrays_and_dtypes))


def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    return np.can_cast(from_.dtype if isinstance(from_, ndarray) else from_, to, casting)


def is_available() -> bool:
    """Return False: what asks for a GPU does not take this one."""
    return False


def _viewing(name: str) -> Callable[..., ndarray]:
    return lambda a, *arguments, **options: a._view(getattr(np, name)(a._values, *arguments, **options))


def _computing(name: str) -> Callable[..., ndarray]:
    def compute(*arguments: Any, **options: Any) -> ndarray:
        on_device(f"cupy_{name}", *(x for x in arguments if isinstance(x, ndarray)))
        with np.errstate(all="ignore"):
            return wrapped(np.asarray(getattr(np, name)(*map(_on_host, arguments), **options)))

    return compute


_VIEWS = ("expand_dims", "flip", "moveaxis", "reshape", "squeeze", "swapaxes", "transpose")
_KERNELS = (
    "argmax",
    "cumsum",
    "repeat",
    "roll",
    "round",
    "searchsorted",
    "sort",
    "take_along_axis",
    "tril",
    "triu",
)
_METHODS = ("all", "any", "astype", "max", "min", "sum", "take")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: _rules.checked(name, function)
    for name, function in {
        **{name: value for name, value in globals().items() if name in _rules.SIGNATURES},
        **{name: _viewing(name) for name in _VIEWS},
        **{name: _computing(name) for name in _KERNELS},
        **{name: getattr(ndarray, name) for name in _METHODS},
        "asnumpy": ndarray.get,
    }.items()
}
"""By name; each takes the arguments of CuPy's function alone."""
