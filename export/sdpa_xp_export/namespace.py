"""The array API as the values of a graph have it: what `x.__array_namespace__()` is while a function is traced.

Each function takes values, and beside them arrays of any library, which become initializers. Of arrays alone it
is that of their own library. `erf`, which the standard lacks, is there too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat
import numpy as np

from sdpa_xp_export import functions, pieces, shaping
from sdpa_xp_export.array import WIDER, Value, unary
from sdpa_xp_export.dispatch import graph_of, is_array, of_values
from sdpa_xp_export.graph import numpy_dtype
from sdpa_xp_export.lengths import Length
from sdpa_xp_export.trace import Trace

bool = "bool"  # dtypes of a graph are their names
int32, int64 = "int32", "int64"
float16, bfloat16, float32, float64 = "float16", "bfloat16", "float32", "float64"
pi, e, inf, nan, newaxis = math.pi, math.e, math.inf, math.nan, None


def _of_floats(op: str) -> Callable[[Value], Value]:
    return lambda x: unary(op, x if x.floating else x.astype(x.graph.real))


def _reduction(op: str) -> Callable[..., Value]:
    def reduce(
        x: Value, *, axis: int | Sequence[int] | None = None, keepdims: Any = False, dtype: Any = None
    ) -> Value:
        x = x if dtype is None else astype(x, dtype)
        return shaping.reduced(op, x.astype("int64") if x.dtype == "bool" else x, axis, keepdims)

    return reduce


add = of_values("add", operator.add)
subtract = of_values("subtract", operator.sub)
multiply = of_values("multiply", operator.mul)
divide = of_values("divide", operator.truediv)
floor_divide = of_values("floor_divide", operator.floordiv)
remainder = of_values("remainder", operator.mod)
pow = of_values("pow", operator.pow)
negative = of_values("negative", operator.neg)
equal = of_values("equal", operator.eq)
not_equal = of_values("not_equal", operator.ne)
less = of_values("less", operator.lt)
less_equal = of_values("less_equal", operator.le)
greater = of_values("greater", operator.gt)
greater_equal = of_values("greater_equal", operator.ge)
logical_and = of_values("logical_and", operator.and_)
logical_or = of_values("logical_or", operator.or_)
logical_not = of_values("logical_not", operator.invert)
where = of_values("where", functions.where)
maximum = of_values("maximum", functions.maximum)
minimum = of_values("minimum", functions.minimum)
abs = of_values("abs", functions.abs)
exp = of_values("exp", functions.exp)
log = of_values("log", functions.log)
sqrt = of_values("sqrt", functions.sqrt)
tanh = of_values("tanh", functions.tanh)
floor = of_values("floor", functions.floor)
is_masked = functions.is_masked
sin = of_values("sin", _of_floats("Sin"))
cos = of_values("cos", functions.cos)
erf = of_values("erf", _of_floats("Erf"))
square = of_values("square", lambda x: x * x)
sum = of_values("sum", _reduction("ReduceSum"))
mean = of_values("mean", _reduction("ReduceMean"))
max = of_values("max", _reduction("ReduceMax"))
min = of_values("min", _reduction("ReduceMin"))
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


def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """`x`, within bounds."""
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def astype(x: Any, dtype: Any, /, *, copy: Any = True, device: object = None) -> Any:
    """`x` in another dtype, which may be that of an array of another library."""
    del copy, device  # a value has neither
    if is_array(x):
        own = array_api_compat.array_namespace(x)
        return own.astype(x, getattr(own, dtype) if isinstance(dtype, str) else dtype)
    return x.astype(_name(dtype))


def asarray(obj: Any, /, *, dtype: Any = None, device: object = None, copy: Any = None) -> Any:
    """A value as it is; a length as a value; numbers as a NumPy array, which becomes an initializer."""
    del device, copy
    made = obj.graph.from_array(obj) if isinstance(obj, Length) else obj
    if isinstance(made, Value):
        return made if dtype is None else made.astype(_name(dtype))
    kind = np.asarray(made).dtype.kind
    default = {"f": float32, "b": bool}.get(kind, int64) if dtype is None else _name(dtype)
    return np.asarray(made, numpy_dtype(default))


def arange(start: Any, /, stop: Any = None, step: int = 1, *, dtype: Any = None, device: object = None) -> Any:
    """start, start + step, ... below stop; either may be a length, also of one that is a sum with the other."""
    start, stop = (0, start) if stop is None else (start, stop)
    graph = graph_of([start, stop])
    if graph is None:
        return asarray(np.arange(start, stop, step), dtype=dtype, device=device)
    first, last, by = (
        graph.constant(n, int64) if isinstance(n, int) else asarray(n) for n in (start, stop, step)
    )
    length = _count(start, stop, step)
    made = graph.add("Range", first, last, by, dtype=int64, shape=(length,))
    if isinstance(graph, Trace) and isinstance(length, str):
        graph.having(made, 0, length)
    return made if dtype is None else made.astype(_name(dtype))


def _count(start: Any, stop: Any, step: int) -> int | str:
    """How many numbers there are from `start` to `stop`, or a name for that."""
    try:
        counted = stop - start if step == 1 else None
    except TypeError:
        counted = None
    return counted if isinstance(counted, int | str) else shaping.named("arange", start, stop, step)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: object = None) -> Any:
    """`fill_value` in each entry."""
    filled = asarray(fill_value, dtype=dtype, device=device)
    shape = (shape,) if isinstance(shape, int | str) else tuple(shape)
    graph = graph_of([*shape, filled])
    if graph is None:
        return np.full(shape, filled)
    value = filled if isinstance(filled, Value) else graph.constant(filled, filled.dtype.name)
    return shaping.broadcast_to(pieces.to_rank(value, len(shape)), shape)


def zeros(shape: Any, *, dtype: Any = float32, device: object = None) -> Any:
    """0 in each entry."""
    return full(shape, 0, dtype=dtype, device=device)


def ones(shape: Any, *, dtype: Any = float32, device: object = None) -> Any:
    """1 in each entry."""
    return full(shape, 1, dtype=dtype, device=device)


def zeros_like(x: Any, /, *, dtype: Any = None, device: object = None) -> Any:
    """0 in each entry."""
    return full(x.shape, 0, dtype=x.dtype if dtype is None else dtype, device=device)


def ones_like(x: Any, /, *, dtype: Any = None, device: object = None) -> Any:
    """1 in each entry."""
    return full(x.shape, 1, dtype=x.dtype if dtype is None else dtype, device=device)


def var(x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: Any = False) -> Any:
    """The sum of the squared distances from the mean, over their count less `correction` or over 0."""
    squares = square(x - mean(x, axis=axis, keepdims=True))
    if not correction:
        return mean(squares, axis=axis, keepdims=keepdims)
    count = sum(ones_like(squares), axis=axis, keepdims=keepdims)
    return sum(squares, axis=axis, keepdims=keepdims) / maximum(count - correction, 0.0)


def std(x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: Any = False) -> Any:
    """The square root of `var`."""
    return sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def result_type(*arrays: Any) -> str:
    """The wider dtype of several."""
    names = [_name(getattr(each, "dtype", each)) for each in arrays]
    return sorted(names, key=WIDER.index)[-1]


class _Info:
    """What there is on every runtime."""

    @staticmethod
    def dtypes(*, device: object = None, kind: Any = None) -> dict[str, str]:
        """Dtypes by their names."""
        del device
        integers, floats = (int32, int64), (float32, float64)
        kinds = {"bool": (bool,), "signed integer": integers, "integral": integers, "real floating": floats}
        names = kinds.get(kind, () if kind else (bool, *integers, *floats))
        return {name: name for name in names}


def __array_namespace_info__() -> _Info:  # noqa: N807, the standard's name
    """Which dtypes there are."""
    return _Info()


def _name(dtype: Any) -> str:
    """The name of a dtype of any library."""
    found = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(found).rpartition(".")[2]
