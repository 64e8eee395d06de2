"""Arrays of which each function is exported by `to_onnx` and run in onnxruntime, for array-api-tests.

What makes no graph is NumPy's: arrays of numbers, single elements, which the tests read one by one, and writes
into arrays, by which hypothesis fills its examples.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnxruntime
from internals import Dtype, GraphValue, graph_namespace, numpy_dtype

from sdpa_xp_export import TensorSpec, to_onnx

RUNTIME = f"onnxruntime>={'.'.join(onnxruntime.__version__.split('.')[:2])};cpu"
onnxruntime.set_default_logger_severity(4)


class Array:
    """A NumPy array, whose operators and functions are exported and run."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = np.asarray(numbers)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        from quality.array_api import namespace

        return namespace

    dtype = property(lambda self: self.numbers.dtype)
    shape = property(lambda self: self.numbers.shape)
    ndim = property(lambda self: self.numbers.ndim)
    size = property(lambda self: computed(lambda x: np.asarray(x.size), self).numbers.item())
    device = property(lambda self: None)
    T = property(lambda self: computed(lambda x: x.T, self))
    mT = property(lambda self: computed(lambda x: x.mT, self))  # noqa: N815, the standard's name

    def to_device(self, device: object, /, *, stream: object = None) -> Array:
        return computed(lambda x: x.to_device(device, stream=stream), self)

    def __getitem__(self, key: Any) -> Array:
        entries = key if isinstance(key, tuple) else (key,)
        if len(entries) == self.ndim and all(type(entry) is int for entry in entries):
            return Array(self.numbers[key])
        return computed(operator.getitem, self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.numbers[leaf_map(numbers_of, key)] = numbers_of(value)

    def __iter__(self) -> Iterator[Array]:
        return iter([Array(row) for row in self.numbers])

    def __repr__(self) -> str:
        return f"Array({self.numbers!r})"

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def __int__(self) -> int:
        return int(self.numbers)

    def __float__(self) -> float:
        return float(self.numbers)

    def __complex__(self) -> complex:
        return complex(self.numbers)

    def __index__(self) -> int:
        return operator.index(self.numbers)

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.numbers.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.numbers.__dlpack_device__()


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_OTHERS = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert")


def _operators() -> None:
    for name in (*_BINARY, *(f"i{name}" for name in _BINARY), *_OTHERS):
        setattr(Array, f"__{name}__", _method(getattr(operator, f"__{name}__")))
    for name in _BINARY:
        function = getattr(operator, f"__{name}__")
        setattr(Array, f"__r{name}__", _method(lambda x, y, function=function: function(y, x)))


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Array, *others: Any) -> Any:
        return computed(function, self, *others)

    return method


def numbers_of(leaf: Any) -> Any:
    return leaf.numbers if isinstance(leaf, Array) else leaf


def leaf_map(change: Callable[[Any], Any], argument: Any) -> Any:
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return slice(*(operator.index(part) if isinstance(part, Array) else part for part in parts))
    if type(argument) in (tuple, list):
        return type(argument)(leaf_map(change, element) for element in argument)
    return change(argument)


def computed(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What a function gives, exported for these arguments and run in onnxruntime."""
    feeds: dict[str, np.ndarray] = {}

    def named(leaf: Any) -> Any:
        if not isinstance(leaf, Array):
            return leaf
        feeds[f"x{len(feeds)}"] = leaf.numbers
        return _Input(f"x{len(feeds) - 1}")

    arguments, keywords = leaf_map(named, arguments), {name: leaf_map(named, x) for name, x in keywords.items()}
    kept: list[Any] = []

    def layer(**values: Any) -> Any:
        def value(leaf: Any) -> Any:
            return values[leaf.name] if isinstance(leaf, _Input) else leaf

        result = function(
            *leaf_map(value, arguments), **{name: leaf_map(value, x) for name, x in keywords.items()}
        )
        kept.append(result)
        several = result if isinstance(result, tuple) else (result,)
        outputs = {f"y{i}": x for i, x in enumerate(several) if isinstance(x, GraphValue)}
        return outputs or {"none": -next(iter(values.values())).astype("float32")}

    if not feeds:
        return wrapped(function(*arguments, **keywords), {})
    specs = {name: TensorSpec(x.dtype.name, x.shape) for name, x in feeds.items()}
    layer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in specs]
    )
    model = to_onnx(layer, **specs, runtime=RUNTIME)
    outputs: dict[str, Any] = {}
    if any(isinstance(x, GraphValue) for x in (kept[0] if isinstance(kept[0], tuple) else kept)):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        names = [output.name for output in model.graph.output]
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
    return wrapped(kept[0], outputs)


class _Input:
    def __init__(self, name: str) -> None:
        self.name = name


def wrapped(result: Any, outputs: dict[str, Any]) -> Any:
    if isinstance(result, tuple):
        parts = [_wrapped(x, outputs.get(f"y{i}")) for i, x in enumerate(result)]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return _wrapped(result, outputs.get("y0"))


def _wrapped(result: Any, numbers: Any) -> Any:
    if isinstance(result, GraphValue):
        assert (numbers.dtype.name, len(numbers.shape)) == (result.elem_type, result.ndim)
        return Array(numbers)
    if isinstance(result, Dtype):
        return numpy_dtype(result.name)
    return Array(result) if isinstance(result, np.ndarray | np.generic) else result


def function_of(name: str) -> Callable[..., Any]:
    """A function of the namespace."""
    function = getattr(graph_namespace, name)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        keywords.pop("device", None)
        if name == "asarray" and not any(isinstance(x, Array) for x in arguments):
            dtype = keywords.get("dtype")
            if dtype is None and np.asarray(leaf_map(numbers_of, arguments[0])).dtype.kind == "c":
                return Array(arguments[0])
            return Array(graph_namespace.asarray(leaf_map(numbers_of, arguments[0]), dtype=dtype))
        return computed(function, *arguments, **keywords)

    return call


_operators()
