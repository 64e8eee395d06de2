"""A dtype by its name as NumPy, ONNX and onnxruntime have it, and arrays of any library as NumPy arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sdpa_xp._libraries import library_of
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
    numbers: NDArray[Any] = library_of(array).to_numpy(array)
    if any_dtype_name(array.dtype) == "bfloat16":
        numbers = numbers.astype(ml_dtypes.bfloat16, copy=False)
    dtypes = (*FLOATING, *INTEGERS, "bool")
    if numbers.dtype.name not in dtypes:
        rule = f"`{name}` must be of a dtype that a graph holds, {', '.join(dtypes)}"
        raise ArgumentTypeError(function, rule, {f"{name}.dtype": numbers.dtype})
    return numbers
