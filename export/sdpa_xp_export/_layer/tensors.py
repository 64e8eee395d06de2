"""Tensors of torch that compute with NumPy arrays, so that a layer which holds tensors takes NumPy inputs.

Methods of the same name differ between the two: `transpose(0, 1)` swaps two axes of a tensor, and none of a
NumPy array. So the copy of a tensor stays a tensor, and becomes a NumPy array where it meets one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from .._dtypes.dtype import to_numpy

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class TensorCopy(torch.Tensor):
    """A tensor whose operators take NumPy arrays, and then return NumPy arrays."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = _numbers(self)
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    def __array_wrap__(self, array: NDArray[Any], *_: object) -> NDArray[Any]:
        """Return what a function of NumPy computed as it is, not as a tensor."""
        return array

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, np.ndarray) for part in parts):
            return _numbers(self)[index]
        return super().__getitem__(index)

    __hash__ = torch.Tensor.__hash__  # a class with an `__eq__` has none otherwise


def _operator(name: str) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: Any) -> Any:
        if isinstance(other, np.ndarray | np.generic):
            return getattr(_numbers(self), name)(other)
        return getattr(torch.Tensor, name)(self, other)

    return operator


_REFLECTED = tuple(f"r{name}" for name in (*_ARITHMETIC, *_BITWISE))
for _name in (*_ARITHMETIC, *_BITWISE, *_REFLECTED, *_COMPARISONS):
    setattr(TensorCopy, f"__{_name}__", _operator(f"__{_name}__"))


class TensorsTakeArrays(TorchFunctionMode):
    """A context in which a tensor that a layer itself makes, as with `torch.ones`, takes NumPy arrays."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.as_subclass(TensorCopy) if type(result) is torch.Tensor else result


def changed_tensor(x: Any, change: Callable[[NDArray[Any]], NDArray[Any]]) -> TensorCopy:
    """Return a tensor of `change(array)` that takes NumPy arrays; a parameter stays one, on its device."""
    array = to_numpy("verify_layer", "weight", x)
    changed = change(array)
    data = x.detach()
    if changed is not array:
        data = _tensor(changed).to(x.device)
    copied: TensorCopy = data.as_subclass(TensorCopy).requires_grad_(x.requires_grad)
    if isinstance(x, torch.nn.Parameter):
        # `isinstance(copied, Parameter)` asks for it (torch.nn.parameter); without it, a layer would miss one.
        copied._is_param = True
    return copied


def is_plain_tensor(x: object) -> bool:
    """Return whether `x` is a tensor, or a parameter of torch itself, not of a class of the caller."""
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _numbers(x: torch.Tensor) -> NDArray[Any]:
    # It also switches off the mode above, which `DisableTorchFunctionSubclass` of torch's docs does not.
    with torch._C.DisableTorchFunction():
        return to_numpy("verify_layer", "weight", x.detach().as_subclass(torch.Tensor))


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:  # torch does not take NumPy's bfloat16
        return torch.tensor(array.astype(np.float32)).to(torch.bfloat16)
    return torch.tensor(array)
