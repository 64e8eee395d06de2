"""torch's kernel of the CPU on arrays of NumPy, for calls with `implementation="torch"`.

Tensors are made at the addresses of the arrays, so nothing is copied, except an array that torch cannot
address. `torch.py` says which calls the kernel computes as documented, and notices wrong results: then the
portable implementation computes the call again, on NumPy.

Halves stay halves, because the kernel then uses the units that some CPUs have for them. It accumulates in
float32, and rounds only the unnormalised weights. Its error was at most 1.8 times that of float32 rounded once,
and at most 0.9 times that of the textbook formula in the half dtype (torch 2.13 on a CPU with AVX-512 BF16, 1
to 1,024 queries, 5 to 4,096 keys, scores of size 1 and 8).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

from .._call import PreparedCall, shared_by_equal_calls
from .._libraries import dtype_name, library_of
from .._libraries.protocols import Array, Dtype
from .._libraries.torch import Torch
from . import torch as torch_kernel


def unsupported_reason(call: PreparedCall) -> str | None:
    """Return why the kernel does not compute the call as documented, or that there is no torch."""
    if call.grid.xp.__name__ != "numpy":
        return "'torch' is for NumPy arrays, and 'native' for those of a library that has a kernel"
    if find_spec("torch") is None:
        return "torch is not installed (install it with `pip install torch`)"
    import_module("torch")
    return torch_kernel.unsupported_by_shape(call, cuts_keys=True)


def attend(call: PreparedCall) -> Array | None:
    """Return the output, (..., Hq, L, Ev); None if the kernel gets a NaN or inf wrong, or torch traces."""
    if Torch.autograd.is_transforming():  # torch would record the operations, or compute none
        return None
    on_torch = _on_torch(call)
    is_bfloat16 = on_torch.result_dtype is sys.modules["torch"].bfloat16
    tensors = {name: _tensor(array, is_bfloat16) for name, array in call.arrays.items()}
    on_torch = PreparedCall(on_torch[0], tensors, *on_torch[2:])
    with on_torch.computing():  # without torch.autocast
        output: Any = torch_kernel.attend(on_torch)
    return None if output is None else _array(output, call.result_dtype)


@shared_by_equal_calls
def _on_torch(call: PreparedCall) -> PreparedCall:
    """Return the call on tensors, without its inputs."""
    like = sys.modules["torch"].empty(0, device="cpu")  # whatever torch's default is
    library = library_of(like)
    xp, names = library.namespace(like), (dtype_name(dtype) for dtype in (call.grid.dtype, call.result_dtype))
    dtype, result_dtype = (getattr(xp, name) for name in names)
    device = library.device(like)
    grid = replace(call.grid, library=library, xp=xp, device=device, dtype=dtype, input_dtype=result_dtype)
    arrays = call.options.arrays()
    options = call.options.with_arrays([_tensor(x, dtype_name(x.dtype) == "bfloat16") for x in arrays])
    return call.changed(grid=grid, arrays={}, options=options, result_dtype=result_dtype)


def _tensor(array: Any, is_bfloat16: bool) -> Any:
    """Return the tensor of an array, in the same memory if torch can address it."""
    torch = sys.modules["torch"]
    if is_bfloat16:  # torch does not know the dtype of ml_dtypes
        array = array.view("int16")
    if not (array.flags.behaved and array.dtype.isnative):
        array = _behaved(array)
    try:
        tensor = torch.from_numpy(array)
    except ValueError:  # of strides that are negative, or not multiples of the size of a number
        tensor = torch.from_numpy(array.copy(order="C"))
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def _array(tensor: Any, dtype: Dtype) -> Array:
    """Return the array of a tensor, in the same memory; `dtype` is its dtype if that is bfloat16."""
    torch = sys.modules["torch"]
    is_bfloat16 = tensor.dtype is torch.bfloat16
    return cast(Array, tensor.view(torch.int16).numpy().view(dtype) if is_bfloat16 else tensor.numpy())


def _behaved(array: Any) -> Any:
    """Return the array as one that is aligned, writeable and in native byte order; a copy unless read-only."""
    numpy = sys.modules["numpy"]
    if not (array.flags.aligned and array.dtype.isnative):
        return numpy.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    # The memory of a read-only array, of which torch would warn; the kernel only reads it.
    interface = array.__array_interface__
    writeable = interface | {"data": (interface["data"][0], False)}
    return numpy.asarray(SimpleNamespace(array=array, __array_interface__=writeable))
