"""The one door to array-api-compat: which library, which dtype, which device, traced or not."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard, cast

import array_api_compat as compat

from sdpa_xp.protocols import AnyArray, Array, Device, Dtype, Namespace

FLOATING = ("float16", "bfloat16", "float32", "float64")
LARGEST = {"float32": (2 - 2**-23) * 2.0**127, "float64": sys.float_info.max}
"""The largest finite number of each accumulation dtype."""


def is_array(value: object) -> TypeGuard[Array]:
    """Whether `value` is an array of a library that follows the standard."""
    return bool(compat.is_array_api_obj(value))


def is_dense(array: Any) -> bool:
    """Whether `array` has an element at each index; torch has sparse and nested tensors, too."""
    if not compat.is_torch_array(array):
        return True
    return array.layout is sys.modules["torch"].strided and not array.is_nested


def namespace(array: AnyArray) -> Namespace:
    """The array-API namespace of `array`, made compatible where the library itself is not."""
    return cast(Namespace, compat.array_namespace(array))


def device(array: Array) -> Device:
    """Where `array` lives; None where its library names no single device (JAX under jit, or sharded)."""
    where = compat.device(array)
    if compat.is_jax_array(array) and not isinstance(where, sys.modules["jax"].Device):
        return None
    return where


def dtype_name(dtype: Dtype) -> str:
    """The dtype's name in the standard, or "bfloat16", which the standard lacks.

    By name, because `isdtype` raises on NumPy's bfloat16 and is False on Dask's. A dtype is an object with a
    name, a class (numpy.float32), or one that prints as library.name.
    """
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rpartition(".")[2]


def accumulation_dtype(xp: Namespace, dtype: Dtype) -> Dtype:
    """Scores, row sums and outputs are held in float64 for float64 input, else in float32."""
    return xp.float64 if dtype_name(dtype) == "float64" else xp.float32


def quiet(array: Array) -> AbstractContextManager[object]:
    """Without the floating-point warnings of NumPy.

    They would tell of what is meant here: exp underflows, and a NaN or inf under a mask is put aside.
    """
    if compat.is_torch_array(array) or compat.is_jax_array(array) or compat.is_cupy_array(array):
        return nullcontext()
    numpy = sys.modules.get("numpy")
    silence = nullcontext() if numpy is None else numpy.errstate(all="ignore")
    return cast(AbstractContextManager[object], silence)


def is_traced(array: Array) -> bool:
    """Whether values cannot be read now: a lazy graph, or an array inside a jit or an export."""
    if compat.is_numpy_array(array) or compat.is_cupy_array(array):
        return False
    if compat.is_torch_array(array):
        torch = sys.modules["torch"]
        mapped = torch._C._functorch.peek_interpreter_stack() is not None  # inside torch.func.vmap or grad
        return bool(torch.compiler.is_compiling()) or mapped or device(array).type == "meta"
    if compat.is_jax_array(array):
        return isinstance(array, sys.modules["jax"].core.Tracer)
    return bool(compat.is_lazy_array(array))
