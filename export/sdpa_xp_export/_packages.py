"""Which code and which objects belong to the caller: neither to Python nor to a library of arrays."""

from __future__ import annotations

import sys
import types
from typing import Any

ARRAY_LIBRARIES = {"array_api_compat", "array_api_strict", "cupy", "dask", "jax", "jaxlib", "ml_dtypes", "mlx"}
ARRAY_LIBRARIES |= {"numpy", "onnx", "onnxruntime", "scipy", "sdpa_xp", "sdpa_xp_export", "torch"}
LIBRARIES = ARRAY_LIBRARIES | (sys.stdlib_module_names - {"__main__"})
"""Packages whose functions and classes hold no parameters, and do not belong to a layer."""


def package_of(value: Any) -> str:
    """Return the package that a class or a function was written in, also if `functools.wraps` names another."""
    is_function = isinstance(value, types.FunctionType)
    module = value.__globals__.get("__name__") if is_function else getattr(value, "__module__", None)
    return str(module or "").partition(".")[0]
