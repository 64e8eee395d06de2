"""Dtypes by name, because each library has its own classes of dtypes."""

from __future__ import annotations

import re
import sys

from sdpa_xp._libraries.protocols import Array, Dtype, Namespace

FLOATING = ("float16", "bfloat16", "float32", "float64")
LARGEST = {"float32": (2 - 2**-23) * 2.0**127, "float64": sys.float_info.max}
"""The largest finite number of each accumulation dtype."""
_NAME = re.compile(r"\b(?:bfloat|float|complex|uint|int)\d+\b|\bbool\b")
_STANDARD = re.compile(r"(?:bfloat|float|complex|uint|int)\d|bool")


def dtype_name(dtype: Dtype) -> str:
    """Return the dtype's name in the standard, or "bfloat16", which the standard lacks.

    Dtypes are compared by name, because `isdtype` raises on NumPy's bfloat16 and is False on Dask's. A dtype is
    an object with a name, a class (numpy.float32), or an object that prints its name: library.float32, Float32
    or <DType float32>.
    """
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    text = str(name).rpartition(".")[2]
    known = None if text.isidentifier() and text.islower() else _NAME.search(text.lower())
    return known[0] if known else text


def has_standard_name(dtype: Dtype) -> bool:
    """Return whether the dtype's name is a name of the standard, or begins with one, such as float8_e4m3fn."""
    return _STANDARD.match(dtype_name(dtype)) is not None


def accumulation_dtype(xp: Namespace, dtype: Dtype) -> Dtype:
    """Return the dtype of scores, row sums and outputs: float64 for float64 input, else float32."""
    return xp.float64 if dtype_name(dtype) == "float64" else xp.float32


def astype_if_needed(xp: Namespace, array: Array, dtype: Dtype) -> Array:
    """Return `array` in `dtype`. The library is not called if the array has that dtype."""
    return array if array.dtype == dtype else xp.astype(array, dtype, copy=False)
