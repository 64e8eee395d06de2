"""The functions that make arrays: from lengths they make values of the graph, from numbers NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np

from sdpa_xp.errors import ArgumentTypeError

from .._dtypes.dtype import Dtype, default_dtype, dtype_name, numpy_dtype
from .._graph import FloatOfLengths, Graph, GraphValue, Length, added, plain
from . import ops
from .dispatch import graph_of, is_array_elsewhere
from .elementwise import equal, maximum, where
from .manipulation import broadcast_to, expand_dims

__all__ = ["arange", "asarray", "astype", "empty", "empty_like", "eye", "from_dlpack", "full", "full_like"]
__all__ += ["linspace", "ones", "ones_like", "zeros", "zeros_like"]


def astype(x: Any, dtype: Any, /, *, copy: Any = True, device: object = None) -> Any:
    """Convert `x` to a dtype, which may be the dtype of another library."""
    del copy, device  # a value has neither
    if isinstance(x, GraphValue):
        return x.astype(dtype_name(dtype))
    return array_api_compat.array_namespace(x).astype(x, dtype_like(x, dtype))


def dtype_like(array: Any, dtype: Any) -> Any:
    """Return the dtype of that name in the library of `array`."""
    if not isinstance(dtype, str | Dtype):
        return dtype
    dtype = dtype_name(dtype)
    if array_api_compat.is_numpy_array(array):
        return numpy_dtype(dtype)  # NumPy alone has no name for bfloat16
    return getattr(array_api_compat.array_namespace(array), dtype)


def asarray(obj: Any, /, *, dtype: Any = None, device: object = None, copy: Any = None) -> Any:
    """Return values and arrays unchanged, a length as a value, and numbers as a NumPy array."""
    del device, copy
    graph = graph_of([obj]) if isinstance(obj, Length | FloatOfLengths) else None
    array = obj if graph is None else graph.operand(obj)
    if isinstance(array, np.generic) and not isinstance(array, float):  # an array without axes
        array = np.asarray(array)
    if isinstance(array, GraphValue) or is_array_elsewhere(array):
        return array if dtype is None else astype(array, dtype)
    numbers = np.asarray(array)
    if numbers.dtype.kind not in "biuf":
        rule = "`obj` must be an array, or numbers"
        raise ArgumentTypeError("asarray", rule, {"obj": type(obj).__name__}, "`stack` joins arrays.")
    kind = {"b": bool, "f": float}.get(numbers.dtype.kind, int)
    return np.asarray(array, numpy_dtype(default_dtype(kind) if dtype is None else dtype_name(dtype)))


def arange(
    start: Any,
    /,
    stop: Any = None,
    step: Any = 1,
    *,
    dtype: Any = None,
    device: object = None,
    length: int | str | None = None,
) -> Any:
    """Return start, start + step, ... below stop; a bound may be a length, or a sum of lengths.

    `length` says how many numbers these are, if only the caller knows it.
    """
    del device
    start, stop = (0, start) if stop is None else (start, stop)
    graph = graph_of([start, stop, step])
    if graph is None:
        numbers = np.arange(start, stop, step)
        default = default_dtype(float if numbers.dtype.kind == "f" else int)
        return np.asarray(numbers, numpy_dtype(default if dtype is None else dtype_name(dtype)))
    length = _count(graph, start, stop, step) if length is None else length
    bounds = [_as_int64(graph, bound) for bound in (start, stop, step)]
    counted = graph.add("Range", *bounds, dtype="int64", shape=(length,))
    return counted if dtype is None else counted.astype(dtype_name(dtype))


def places(graph: Graph, length: int | Length) -> GraphValue:
    """Return the indices of an axis of that length."""
    counted = arange(length)
    return counted if isinstance(counted, GraphValue) else graph.constant(counted, "int64")


def as_value(graph: Graph, length: int | Length, least: int = 0) -> GraphValue:
    """Return a length as an integer, (), that is at least `least`."""
    if isinstance(length, int):
        return graph.constant(max(length, least), "int64")
    return maximum(graph.operand(length), least, exact=False) if least else graph.operand(length)


def _as_int64(graph: Graph, bound: Any) -> GraphValue:
    """Convert a bound to int64: an integer, a length, or a value without axes."""
    if isinstance(bound, int) and not isinstance(bound, bool):
        return graph.constant(bound, "int64")
    value = graph.operand(bound) if isinstance(bound, GraphValue | Length) else None
    if value is None or value.dims or "int" not in value.elem_type:
        rule = "a range to or from a length must have integer bounds"
        raise ArgumentTypeError(graph.function, rule, {"bound": repr(bound)})
    return value.astype("int64")


def _count(graph: Graph, start: Any, stop: Any, step: Any) -> int | str:
    """Return how many numbers there are from `start` to `stop`, or a name for that."""
    if isinstance(step, int) and step > 0 and all(isinstance(bound, int | Length) for bound in (start, stop)):
        first, end = (graph.lengths.terms(plain(bound)) for bound in (start, stop))
        return graph.lengths.counted(added(end, first, -1), step)
    return graph.lengths.fresh("arange", start, stop, step)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: object = None) -> Any:
    """Return an array that is filled with `fill_value`."""
    filled = asarray(fill_value, dtype=dtype, device=device)
    shape = (shape,) if isinstance(shape, int | Length) else tuple(shape)
    graph = graph_of([*shape, filled])
    if graph is None:
        return np.full(shape, filled)
    is_numpy = isinstance(filled, np.ndarray)
    value = graph.constant(filled, filled.dtype.name) if is_numpy else graph.operand(filled)
    return broadcast_to(ops.to_rank(value, len(shape)), shape)


def zeros(shape: Any, *, dtype: Any = None, device: object = None) -> Any:
    """Return an array of zeros."""
    return full(shape, 0, dtype=default_dtype(float) if dtype is None else dtype, device=device)


def ones(shape: Any, *, dtype: Any = None, device: object = None) -> Any:
    """Return an array of ones."""
    return full(shape, 1, dtype=default_dtype(float) if dtype is None else dtype, device=device)


def full_like(x: Any, /, fill_value: Any, *, dtype: Any = None, device: object = None) -> Any:
    """Return an array that is filled with `fill_value`, of the shape and the dtype of `x`."""
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device)


def _filled_like(number: int) -> Callable[..., Any]:
    """Make a function that returns an array of one number, of the shape of another array."""

    def function(x: Any, /, *, dtype: Any = None, device: object = None) -> Any:
        return full_like(x, number, dtype=dtype, device=device)

    return function


empty, empty_like = zeros, _filled_like(0)  # a graph has no memory that nothing was written to
zeros_like, ones_like = _filled_like(0), _filled_like(1)


def from_dlpack(x: Any, /, *, device: object = None, copy: Any = None) -> Any:
    """Return a value unchanged, and an array of another library as a NumPy array."""
    del device, copy
    return x if isinstance(x, GraphValue) else np.from_dlpack(x)


def eye(n_rows: Any, n_cols: Any = None, /, *, k: int = 0, dtype: Any = None, device: object = None) -> Any:
    """Return a matrix of ones on a diagonal; a length may be a name."""
    del device
    n_cols = n_rows if n_cols is None else n_cols
    dtype = dtype_name(default_dtype(float) if dtype is None else dtype)
    graph = graph_of([n_rows, n_cols])
    if graph is None:
        return np.eye(n_rows, n_cols, k, numpy_dtype(dtype))
    rows, columns = (places(graph, length) for length in (n_rows, n_cols))
    return equal(expand_dims(rows + k, axis=-1), columns).astype(dtype)


def linspace(
    start: Any, stop: Any, /, num: Any, *, dtype: Any = None, device: object = None, endpoint: bool = True
) -> Any:
    """Return `num` numbers from start to stop with equal distances; `num` may be the name of a length."""
    del device
    dtype = dtype_name(default_dtype(float) if dtype is None else dtype)
    graph = graph_of([start, stop, num])
    if graph is None:
        return np.linspace(start, stop, num, endpoint=endpoint).astype(numpy_dtype(dtype))
    first, last = (asarray(bound, dtype="float64") for bound in (start, stop))
    steps_taken = places(graph, num).astype("float64")
    steps = maximum(asarray(num, dtype="int64") - int(endpoint), 1)
    numbers = first + steps_taken * ((last - first) / astype(steps, "float64"))
    # As in NumPy, the last number is `stop` itself, which the sum may miss by a rounding.
    is_last = equal(steps_taken, astype(steps, "float64")) if endpoint else None
    return (numbers if is_last is None else where(is_last, last, numbers)).astype(dtype)
