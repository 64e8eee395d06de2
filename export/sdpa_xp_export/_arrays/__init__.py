"""The array API of the values of a graph: what `x.__array_namespace__()` returns while a function is traced.

Each function accepts values, and also arrays of any library, which become initializers. Without a value it
calls the function of the library of the arrays. The standard lacks `erf` and `is_masked`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, NoReturn

from sdpa_xp_export._arrays.arithmetic import (
    bitwise_left_shift,
    bitwise_right_shift,
    divide,
    floor_divide,
    pow,
    remainder,
)
from sdpa_xp_export._arrays.creation import arange, asarray, astype, full, ones, ones_like, zeros, zeros_like
from sdpa_xp_export._arrays.elementwise import (
    abs,
    add,
    bitwise_and,
    bitwise_invert,
    bitwise_or,
    bitwise_xor,
    clip,
    cos,
    equal,
    erf,
    exp,
    floor,
    greater,
    greater_equal,
    is_masked,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    positive,
    sin,
    sqrt,
    square,
    subtract,
    tanh,
    where,
)
from sdpa_xp_export._arrays.indexing import item as item
from sdpa_xp_export._arrays.indexing import take, unstack
from sdpa_xp_export._arrays.manipulation import (
    broadcast_to,
    concat,
    expand_dims,
    matrix_transpose,
    moveaxis,
    permute_dims,
    reshape,
    squeeze,
    stack,
)
from sdpa_xp_export._arrays.numpy_and_torch import attribute_error as attribute_error
from sdpa_xp_export._arrays.numpy_and_torch import in_place_result as in_place_result
from sdpa_xp_export._arrays.numpy_and_torch import missing_function
from sdpa_xp_export._arrays.numpy_and_torch import numpy_error as numpy_error
from sdpa_xp_export._arrays.numpy_and_torch import of_ufunc as of_ufunc
from sdpa_xp_export._arrays.reductions import matmul, max, mean, min, std, sum, var
from sdpa_xp_export._dtypes import (
    bfloat16,
    bool,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from sdpa_xp_export._dtypes.dtype import __array_namespace_info__, result_type

__all__ = [
    "__array_namespace_info__",
    "abs",
    "add",
    "arange",
    "asarray",
    "astype",
    "bfloat16",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "bool",
    "broadcast_to",
    "clip",
    "concat",
    "cos",
    "divide",
    "e",
    "equal",
    "erf",
    "exp",
    "expand_dims",
    "float16",
    "float32",
    "float64",
    "floor",
    "floor_divide",
    "full",
    "greater",
    "greater_equal",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_masked",
    "less",
    "less_equal",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matmul",
    "matrix_transpose",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "moveaxis",
    "multiply",
    "nan",
    "negative",
    "newaxis",
    "not_equal",
    "ones",
    "ones_like",
    "permute_dims",
    "pi",
    "positive",
    "pow",
    "remainder",
    "reshape",
    "result_type",
    "sin",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "subtract",
    "sum",
    "take",
    "tanh",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unstack",
    "var",
    "where",
    "zeros",
    "zeros_like",
]

if not TYPE_CHECKING:  # a type checker would allow any function

    def __getattr__(name: str) -> NoReturn:
        """Say what the array API has instead of a function of another library."""
        is_special = name.startswith("__")
        raise AttributeError(name) if is_special else missing_function(name, sys.modules[__name__])


pi = math.pi
e = math.e
inf = math.inf
nan = math.nan
newaxis = None
