"""The one door to array-api-compat: which library, which dtype, which device, traced or not."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, TypeAlias, TypeGuard, TypeVar, cast

import array_api_compat as compat

from sdpa_xp import mlx
from sdpa_xp.protocols import AnyArray, Array, Device, Dtype, Namespace

A = TypeVar("A")
FLOATING = ("float16", "bfloat16", "float32", "float64")
Engine: TypeAlias = Literal["traced", "threads", "cores", "device"]
"""What computes: a compiler later; one core a thread; all cores together; a device, or what is not known.

On "threads" and "cores" arrays can be written to.
"""
LARGEST = {"float32": (2 - 2**-23) * 2.0**127, "float64": sys.float_info.max}
"""The largest finite number of each accumulation dtype."""


def is_array(value: object) -> TypeGuard[Array]:
    """Whether `value` is an array of a library that follows the standard; a scalar of NumPy is a number."""
    return not is_number(value) and bool(compat.is_array_api_obj(value))


def is_number(value: object) -> bool:
    """Whether `value` is a number of Python or of NumPy."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, numbers.Number) or (numpy is not None and isinstance(value, numpy.generic))


def unfit(value: object) -> str:
    """Why an array has another arithmetic than the standard's, or no elements; nothing where it is plain."""
    numpy, bias = sys.modules.get("numpy"), sys.modules.get("torch.nn.attention.bias")
    if numpy is not None and isinstance(value, numpy.ma.MaskedArray):
        return "Its own mask would be ignored: pass `.data`, and an `attn_mask` of what may attend."
    if numpy is not None and isinstance(value, numpy.matrix):
        return "Its `*` is a matrix product: pass numpy.asarray(...) of it."
    if numpy is not None and isinstance(value, numpy.ndarray) and _overrides_operations(type(value), numpy):
        return "Its class changes what operations mean: pass numpy.asarray(...) of it."
    if bias is not None and isinstance(value, bias.CausalBias):
        return "It holds no elements: `masks.causal()` and `masks.causal('lower_right')` say the same."
    if is_array(value) and not _is_dense(value):
        return "A sparse or nested tensor is none: `.to_dense()` or padding makes one."
    return ""


def _overrides_operations(kind: type[Any], numpy: Any) -> bool:
    """Whether a subclass of ndarray defines what NumPy's functions do with it, as units and masks need."""
    if kind is numpy.ndarray:
        return False
    hooks = ("__array_ufunc__", "__array_function__")
    return any(getattr(kind, hook) is not getattr(numpy.ndarray, hook) for hook in hooks)


def plain(array: A) -> A:
    """Return `array` in the class that its library's functions return: a subclass as a view of its elements.

    A tensor whose class has a `__torch_function__` or `__torch_dispatch__` of its own stays as it is.
    """
    kind: Any = type(array)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return array if kind is numpy.ndarray else cast(A, numpy.asarray(array))
    if torch is None or not isinstance(array, torch.Tensor) or kind in (torch.Tensor, torch.nn.Parameter):
        return array
    function = getattr(kind.__torch_function__, "__func__", None)
    plain_function = function is torch.Tensor.__torch_function__.__func__
    plain_dispatch = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return cast(A, array.as_subclass(torch.Tensor)) if plain_function and plain_dispatch else array


def numpy_array() -> Array:
    """An array of NumPy, where nothing else says which library is meant."""
    import array_api_compat.numpy as numpy

    return cast(Array, numpy.empty(0))


def is_writeable(array: Any) -> bool:
    """Whether each element of `array` can be set, and by itself."""
    if compat.is_torch_array(array):
        repeated = any(step == 0 and n > 1 for step, n in zip(array.stride(), array.shape, strict=True))
        return not repeated and not (array.requires_grad and array.is_leaf)
    settable = hasattr(array, "__setitem__") and not compat.is_dask_array(array)
    return settable and bool(compat.is_writeable_array(array))


def full_name(array: Array) -> str:
    """The type of an array, with its library."""
    return f"{type(array).__module__}.{type(array).__qualname__}"


def _is_dense(array: Any) -> bool:
    if not compat.is_torch_array(array):
        return True
    return array.layout is sys.modules["torch"].strided and not array.is_nested


def namespace(array: AnyArray) -> Namespace:
    """The array-API namespace of `array`, made compatible where the library itself is not."""
    return mlx.namespace() if mlx.is_mlx_array(array) else cast(Namespace, compat.array_namespace(array))


def device(array: Array) -> Device:
    """Where `array` lives; None where its library names no single device (JAX under jit, or sharded)."""
    if mlx.is_mlx_array(array):
        return mlx.device()
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


def real_dtypes(xp: Namespace, device: Device) -> Collection[str]:
    """The names of the real floating dtypes of the standard that there are on `device`."""
    if xp.__name__.endswith("torch"):  # torch.compile cannot trace the question
        return ("float32",) if getattr(device, "type", device) == "mps" else ("float32", "float64")
    info = cast(Any, xp).__array_namespace_info__()
    return cast(Collection[str], info.dtypes(device=device, kind="real floating"))


def widest_dtype(xp: Namespace, device: Device) -> Dtype:
    """float64 where there is one on `device`, else float32."""
    return xp.float64 if "float64" in real_dtypes(xp, device) else xp.float32


def to_list(array: Array) -> Any:
    """The elements as numbers of Python, in nested lists; a Dask array is computed."""
    if hasattr(array, "tolist"):  # JAX reads a constant so inside a jit, where indexing would trace it
        return array.tolist()
    if compat.is_dask_array(array):
        return to_list(cast(Any, array).compute())
    if array.ndim == 0:
        kind = dtype_name(array.dtype)
        return bool(array) if kind == "bool" else float(array) if kind in FLOATING else int(array)
    return [to_list(array[index, ...]) for index in range(array.shape[0])]


def signed(array: Array) -> Array:
    """An integer array in a signed dtype: libraries compute little with unsigned ones.

    Those of 64 bits that do not fit wrap around: they are told apart from each other, and are below 0.
    """
    if not dtype_name(array.dtype).startswith("uint"):
        return array
    xp = cast(Any, namespace(array))
    known = compat.is_torch_array(array)  # torch.compile cannot trace the question
    wide = known or "int64" in xp.__array_namespace_info__().dtypes(device=device(array), kind="signed integer")
    return cast(Array, xp.astype(array, xp.int64 if wide else xp.int32))


def accumulation_dtype(xp: Namespace, dtype: Dtype) -> Dtype:
    """Scores, row sums and outputs are held in float64 for float64 input, else in float32."""
    return xp.float64 if dtype_name(dtype) == "float64" else xp.float32


def quiet(array: Array) -> AbstractContextManager[object]:
    """Compute without the floating-point warnings of NumPy, and without torch's autocast.

    The warnings would tell of what is meant here: exp underflows, and a NaN or inf under a mask is put aside.
    Autocast would round float32 products to a half.
    """
    return quiet_for(array)()


def quiet_for(array: Array) -> Callable[[], AbstractContextManager[object]]:
    """Return what `quiet` calls for every array of this library and device."""
    numpy, library = sys.modules.get("numpy"), library_name(array)
    if library == "torch":
        torch, kind = sys.modules["torch"], device(array).type
        if torch.amp.is_autocast_available(kind):
            return partial(_without_autocast, torch, kind)
    loud = numpy is not None and library == "other"
    return partial(cast(Any, numpy).errstate, all="ignore") if loud else nullcontext


def _without_autocast(torch: Any, kind: str) -> AbstractContextManager[object]:
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return cast(AbstractContextManager[object], torch.autocast(kind, enabled=False))


def is_traced(array: Array) -> bool:
    """Whether values cannot be read now: a lazy graph, or an array inside a jit or an export."""
    if compat.is_numpy_array(array) or compat.is_cupy_array(array):
        return False
    if compat.is_torch_array(array):
        return _is_transforming(sys.modules["torch"]) or device(array).type == "meta"
    if compat.is_jax_array(array):
        return isinstance(array, sys.modules["jax"].core.Tracer)
    return mlx.is_traced(array) if mlx.is_mlx_array(array) else bool(compat.is_lazy_array(array))


def _is_transforming(torch: Any) -> bool:
    """Inside torch.compile, torch.export, torch.func.vmap or grad."""
    return bool(torch.compiler.is_compiling()) or torch._C._functorch.peek_interpreter_stack() is not None


def is_compiling() -> bool:
    """Whether torch.compile or torch.export traces what is called now."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def has_tangents() -> bool:
    """Whether torch carries derivatives along with what it computes, in its forward mode."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.autograd.forward_ad._current_level >= 0


def fingerprint(array: object) -> object:
    """What tells arrays apart, but for their numbers; None where a number may matter to what they are."""
    find = _FINGERPRINTS.get(type(array), _unknown)
    return find(array)


def _unknown(array: Any) -> object:
    """Learns the classes of plain arrays; not their subclasses, which may mean something else."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        _FINGERPRINTS[numpy.ndarray] = _of_numpy
    if mlx.is_mlx_array(array):
        _FINGERPRINTS[type(array)] = _of_mlx
    if torch is not None and not torch.compiler.is_compiling():
        _FINGERPRINTS[torch.Tensor] = _FINGERPRINTS[torch.nn.Parameter] = _of_torch
    return _FINGERPRINTS[type(array)](array) if type(array) in _FINGERPRINTS else None


def _of_numpy(array: Any) -> object:
    return array.shape, array.dtype


def _of_torch(array: Any) -> object:
    torch = sys.modules["torch"]
    if _is_transforming(torch) or torch._C._is_tracing() or torch.autograd.forward_ad._current_level >= 0:
        return None
    if array.layout is not torch.strided or array.is_nested:
        return None
    learned = array.requires_grad and torch.is_grad_enabled()
    return type(array), array.shape, array.dtype, array.device, learned


def _of_mlx(array: Any) -> object:
    return None if mlx.is_traced(array) else (array.shape, array.dtype, str(mlx.device()))


_FINGERPRINTS: dict[type, Callable[[Any], object]] = {}


def engine(arrays: Iterable[Array]) -> Engine:
    """What computes with `arrays`."""
    arrays = list(arrays)
    if any(is_traced(array) for array in arrays):
        return "traced"
    if all(compat.is_numpy_array(array) for array in arrays):
        return "threads"
    if all(compat.is_torch_array(array) and device(array).type == "cpu" for array in arrays):
        torch = sys.modules["torch"]
        learned = torch.is_grad_enabled() and any(cast(Any, array).requires_grad for array in arrays)
        return "device" if learned or has_tangents() else "cores"
    return "device"


def placed(array: Array, device: Device) -> Array:
    """`array` on `device`; MLX has one memory for all devices."""
    return array if mlx.is_mlx_array(array) else cast(Array, compat.to_device(array, device))


def on_host(array: Any) -> Any:
    """An array that NumPy can look at: on the CPU, its elements there, and without what torch records."""
    library = library_name(array)
    if library == "torch":
        return array.detach().cpu()
    if library == "jax":
        jax = sys.modules["jax"]
        return jax.device_put(array, jax.devices("cpu")[0])
    if library == "cupy":
        return array.get()
    return array.compute() if compat.is_dask_array(array) else array


def converted(xp: Namespace, array: Array, dtype: Dtype) -> Array:
    """`array` in `dtype`; itself where that is its own."""
    return array if array.dtype == dtype else xp.astype(array, dtype, copy=False)


def tied(output: Array, inputs: Iterable[Array]) -> Array:
    """An output of torch that follows from none of the inputs, with a gradient of 0 to those that learn."""
    xp = namespace(output)
    learned = [x for x in inputs if cast(Any, x).requires_grad] if cast(Any, xp).is_grad_enabled() else []
    for x in learned:
        output = output + converted(xp, xp.sum(x[..., :0]), output.dtype)
    return output


def exp_in_place(xp: Namespace, array: Array) -> Array:
    """exp of an array that can be written to, in its memory: `out` is not in the standard."""
    computed: Array = xp.exp(array, out=array)  # type: ignore[call-arg]
    return computed


def library_name(array: Array) -> str:
    """The library of `array`, if it is one that is treated by name; else "other"."""
    known = {
        "torch": compat.is_torch_array,
        "jax": compat.is_jax_array,
        "cupy": compat.is_cupy_array,
        "mlx": mlx.is_mlx_array,
    }
    return next((name for name, belongs in known.items() if belongs(array)), "other")
