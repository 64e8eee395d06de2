"""A dtype by its name as NumPy, ONNX and onnxruntime have it, and arrays of any library as NumPy arrays."""

from __future__ import annotations

from typing import Any

import array_api_compat
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sdpa_xp._libraries.dtypes import dtype_name as any_dtype_name
from sdpa_xp.errors import ArgumentTypeError
from sdpa_xp_export._dtypes.promotion import DTYPES, FLOATING, INTEGERS


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


ONNX_DTYPE = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "bfloat16": 16,
}
"""The number that ONNX has for each dtype, by name. onnx is not asked: `_agree.backends` does without it."""

_RUNTIME_NAMES = {"float32": "float", "float64": "double"}
RUNTIME_DTYPES = {f"tensor({_RUNTIME_NAMES.get(name, name)})": numpy_dtype(name) for name in DTYPES}
"""NumPy's dtypes by the names that onnxruntime has for the types of tensors."""


def to_numpy(function: str, name: str, array: Any) -> NDArray[Any]:
    """Return the numbers of an array of any library; they share its memory if that is the host's.

    Args:
        function: The function that messages name.
        name: The argument that messages name.
        array: The array; its dtype must be one that a graph holds.
    """
    if array_api_compat.is_torch_array(array):
        array = array.detach()
    if array_api_compat.is_torch_array(array) or array_api_compat.is_cupy_array(array):
        array = array_api_compat.to_device(array, "cpu")
    if any_dtype_name(array.dtype) == "bfloat16" and not array_api_compat.is_numpy_array(array):
        xp = array_api_compat.array_namespace(array)
        wide = to_numpy(function, name, xp.astype(array, xp.float32))  # DLPack of NumPy has no bfloat16
        return wide.astype(ml_dtypes.bfloat16)
    direct = array_api_compat.is_numpy_array(array) or not hasattr(array, "__dlpack__")
    numbers: NDArray[Any] = np.asarray(array if direct else np.from_dlpack(array))
    dtypes = (*FLOATING, *INTEGERS, "bool")
    if numbers.dtype.name not in dtypes:
        rule = f"`{name}` must be of a dtype that a graph holds, {', '.join(dtypes)}"
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": numbers.dtype})
    return numbers
