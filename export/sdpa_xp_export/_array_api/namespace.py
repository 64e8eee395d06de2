"""The array API as the values of a graph have it: what `x.__array_namespace__()` is while a function is traced.

Each function takes values, and beside them arrays of any library, which become initializers. Of arrays alone it
is that of their own library. `erf`, which the standard lacks, is there too.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from sdpa_xp_export._array_api import elementwise as functions
from sdpa_xp_export._array_api import reductions, shaping
from sdpa_xp_export._array_api.creation import (
    arange,
    asarray,
    astype,
    full,
    ones,
    ones_like,
    own_dtype,
    zeros,
    zeros_like,
)
from sdpa_xp_export._array_api.dispatch import of_values
from sdpa_xp_export._dtypes.standard import __array_namespace_info__, dtype_name, result_type
from sdpa_xp_export._graph.value import Value

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

bool = "bool"  # dtypes of a graph are their names
int8 = "int8"
int16 = "int16"
int32 = "int32"
int64 = "int64"
uint8 = "uint8"
uint16 = "uint16"
uint32 = "uint32"
uint64 = "uint64"
float16 = "float16"
bfloat16 = "bfloat16"
float32 = "float32"
float64 = "float64"
pi = math.pi
e = math.e
inf = math.inf
nan = math.nan
newaxis = None

add = of_values("add", operator.add)
subtract = of_values("subtract", operator.sub)
multiply = of_values("multiply", operator.mul)
divide = of_values("divide", operator.truediv)
floor_divide = of_values("floor_divide", operator.floordiv)
remainder = of_values("remainder", operator.mod)
pow = of_values("pow", operator.pow)
negative = of_values("negative", operator.neg)
positive = of_values("positive", operator.pos)
equal = of_values("equal", operator.eq)
not_equal = of_values("not_equal", operator.ne)
less = of_values("less", operator.lt)
less_equal = of_values("less_equal", operator.le)
greater = of_values("greater", operator.gt)
greater_equal = of_values("greater_equal", operator.ge)
bitwise_and = of_values("bitwise_and", operator.and_)
bitwise_or = of_values("bitwise_or", operator.or_)
bitwise_xor = of_values("bitwise_xor", operator.xor)
bitwise_invert = of_values("bitwise_invert", operator.invert)
bitwise_left_shift = of_values("bitwise_left_shift", operator.lshift)
bitwise_right_shift = of_values("bitwise_right_shift", operator.rshift)
logical_and = of_values("logical_and", functions.logical_and)
logical_or = of_values("logical_or", functions.logical_or)
logical_xor = of_values("logical_xor", functions.logical_xor)
logical_not = of_values("logical_not", functions.logical_not)
where = of_values("where", functions.where)
maximum = of_values("maximum", functions.maximum)
minimum = of_values("minimum", functions.minimum)
clip = of_values("clip", functions.clip)
abs = of_values("abs", functions.absolute)
exp = of_values("exp", functions.exp)
log = of_values("log", functions.log)
sqrt = of_values("sqrt", functions.sqrt)
tanh = of_values("tanh", functions.tanh)
sin = of_values("sin", functions.sin)
cos = of_values("cos", functions.cos)
erf = of_values("erf", functions.erf)
floor = of_values("floor", functions.floor)
square = of_values("square", functions.square)
is_masked = functions.is_masked
mean = of_values("mean", reductions.mean)
max = of_values("max", reductions.largest)
min = of_values("min", reductions.smallest)
var = of_values("var", reductions.var)
std = of_values("std", reductions.std)
matmul = of_values("matmul", shaping.matmul)
reshape = of_values("reshape", shaping.reshape)
permute_dims = of_values("permute_dims", shaping.permute_dims)
matrix_transpose = of_values("matrix_transpose", shaping.matrix_transpose)
moveaxis = of_values("moveaxis", shaping.moveaxis)
expand_dims = of_values("expand_dims", shaping.expand_dims)
squeeze = of_values("squeeze", shaping.squeeze)
broadcast_to = of_values("broadcast_to", shaping.broadcast_to)
concat = of_values("concat", shaping.concat)
stack = of_values("stack", shaping.stack)
unstack = of_values("unstack", shaping.unstack)
take = of_values("take", shaping.take)
_total = of_values("sum", reductions.total)


def sum(x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Any:
    """The sum over some axes, or all; of integers in 64 bits unless `dtype` says another."""
    if dtype is not None:
        dtype = dtype_name(dtype) if isinstance(x, Value) else own_dtype(x, dtype)
    return _total(x, axis=axis, dtype=dtype, keepdims=keepdims)
