"""Tensors of torch that say they are on cuda:0 and are computed on the CPU, with a count of what CUDA would do.

They show which operation runs on which device, each value that is read, each copy and each launch. The numbers
are the CPU's, so that they can be compared bit by bit; they say nothing about a GPU's numbers or time.

Operations that mix devices are refused, as torch does on CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from internals import Torch
from standins import counts
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
VIEWS = frozenset(
    [
        *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty", "empty_like"),
        *("empty_strided", "expand", "lift_fresh", "new_empty", "permute", "select", "slice", "split"),
        *("squeeze", "split_with_sizes", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
    ]
)
"""Operations that launch no kernel."""
READS = ("_local_scalar_dense", "_unique2", "equal", "masked_select", "nonzero", "unique_consecutive")
"""Operations whose result, or whose shape, the program must know."""
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
SIGNATURE = Torch.array_signature


class CudaTensor(torch.Tensor):
    """A tensor that says it is on cuda:0, around a tensor on the CPU."""

    inner: torch.Tensor
    # torch's C++ code would ask for a CUDA driver, so it is told that the tensor is on the CPU.
    device = CUDA
    is_cuda, is_cpu = True, False

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CudaTensor:
        tensor: CudaTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CPU,
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, tensors = func.__name__.partition(".")[0], _tensors((args, kwargs))
        on_cpu = [x for x in tensors if not isinstance(x, CudaTensor)]
        _refuse_two_devices(name, args, on_cpu)
        _count(name, args, on_cpu)
        computed = func(*tree_map(_inner, args), **tree_map(_inner, kwargs or {}))
        known = {id(x.inner): x for x in tensors if isinstance(x, CudaTensor)}

        def on_device(x: Any) -> Any:  # an operation in place returns its argument
            if not isinstance(x, torch.Tensor):
                return x
            return known[id(x)] if id(x) in known else CudaTensor(x)

        return tree_map(on_device, computed)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return _read(self).tolist()

    def __repr__(self, **_: Any) -> str:  # pytest shows a tensor of a failed test; this is no read of sdpa_xp
        return f"CudaTensor({self.inner!r})"


class _Device(TorchFunctionMode):
    """Functions that make a tensor on cuda:0, or move one from there or to there."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, dict(kwargs or {})
        first = args[0] if args else None
        if name == "backward":  # derivatives of ours make tensors too, but the mode has ended for `func`
            with self:
                torch.autograd.Variable._execution_engine.run_backward(
                    (first,),
                    (torch.ones_like(first),),
                    False,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            return None
        if name in ("to", "cpu", "cuda"):
            return _moved(func, first, args, kwargs)
        if isinstance(first, CudaTensor) and name == "numpy":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if not _is_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        if any(isinstance(x, CudaTensor) for x in _tensors(args)):
            return func(*args, **kwargs | {"device": CPU})
        tensor = func(*args, **kwargs | {"device": CPU})
        if name in ("asarray", "as_tensor", "tensor"):
            counts.copy(f"{tuple(tensor.shape)}")
            tensor = tensor.detach().clone()
        elif not name.startswith("empty"):
            counts.launch(name)
        return CudaTensor(tensor)


def put(array: torch.Tensor) -> CudaTensor:
    """Return a tensor on the device, uncounted."""
    return CudaTensor(array)


def get(array: Any) -> torch.Tensor:
    """Return the values of a tensor, uncounted."""
    assert isinstance(array, CudaTensor), type(array)
    return array.detach().inner


@contextmanager
def cuda_tensors() -> Iterator[counts.Counts]:
    """Make tensors on cuda:0, and count what is done with them."""
    with pytest.MonkeyPatch.context() as patch, _Device(), counts.counted() as counted:
        patch.setattr(Torch, "array_signature", _array_signature)
        yield counted


@functools.cache
def begin() -> None:
    """Make tensors on cuda:0 until the process ends."""
    Torch.array_signature = _array_signature  # type: ignore[method-assign]
    _Device().__enter__()


def _array_signature(library: Torch, array: Any) -> object:
    """Return the key of a call, which is kept for a tensor on CUDA as for one on the CPU.

    A subclass may change what operations mean, so that its calls are not kept. But a tensor on CUDA is none.
    """
    if not isinstance(array, CudaTensor):
        return SIGNATURE(library, array)
    return SIGNATURE(library, array.inner), array.requires_grad, CUDA


def _moved(func: Callable[..., Any], tensor: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what `to`, `cpu` and `cuda` return."""
    named = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, str | torch.device)]
    if func.__name__ != "to":
        named = [func.__name__]
    to_cuda = _is_cuda(named[0]) if named else isinstance(tensor, CudaTensor)
    if isinstance(tensor, CudaTensor) and not to_cuda:
        return func(_read(tensor), *args[1:], **kwargs)
    args = [CPU if isinstance(x, str | torch.device) else x for x in args]
    kwargs = {name: CPU if name == "device" else x for name, x in kwargs.items()}
    moved = args[0] if func.__name__ != "to" else func(*args, **kwargs)
    if to_cuda and not isinstance(tensor, CudaTensor):
        counts.copy(f"{tuple(moved.shape)}")
        return CudaTensor(moved.clone())
    return moved


def _count(name: str, args: Any, on_cpu: list[torch.Tensor]) -> None:
    indices = _tensors(args[1]) if name in INDEXED else []
    if name in READS or any(x.dtype == torch.bool for x in indices):
        counts.wait(name)
    for x in on_cpu:
        if name in INDEXED or (name == "copy_" and x.ndim):
            counts.copy(f"{name} of {tuple(x.shape)}")
        elif name == "where":  # torch fills a tensor with a number
            counts.launch("fill")
    if name not in VIEWS and name not in READS:
        counts.launch(name)


def _refuse_two_devices(name: str, args: Any, on_cpu: list[torch.Tensor]) -> None:
    """Raise torch's error: only numbers, indices and the source of a copy may be on the CPU."""
    if name == "copy_" or name in INDEXED:
        on_cpu = [x for x in on_cpu if x is args[0]]
    if any(x.ndim for x in on_cpu):
        shapes = [tuple(x.shape) for x in on_cpu]
        raise RuntimeError(f"Expected all tensors to be on the same device; got cuda:0, cpu {shapes} in {name}")


def _read(tensor: CudaTensor) -> torch.Tensor:
    counts.wait(f"{tuple(tensor.shape)}")
    return get(tensor)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, CudaTensor) else value
