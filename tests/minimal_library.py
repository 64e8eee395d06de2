"""A library that the package does not know: it wraps NumPy, and has no more than an array must have.

It refuses everything that the section "What an array must have" of docs/how-to/add-a-backend.md does not list.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import array_api_compat.numpy as np_compat
import numpy as np
from internals import Namespace

SCALARS = {"where": ("x", "y"), "clip": ("min", "max")}
"""The arguments of functions that may be Python scalars in the place of arrays, as the page lists them."""
NO_ONE_DTYPE = {"where": ("condition",), "take": ("indices",), "take_along_axis": ("indices",)}
"""The arguments whose dtype may be another than that of the other arrays."""
NUMBERS = (bool, int, float)


class Array:
    """An array of the library."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    shape = property(lambda self: self.data.shape)
    ndim = property(lambda self: self.data.ndim)
    dtype = property(lambda self: self.data.dtype)
    device = "cpu"

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        del api_version
        return minimal

    def __getitem__(self, index: Any) -> Array:
        return Array(np.asarray(self.data[checked_index(index, self.ndim)]))

    def __setitem__(self, index: Any, value: Any) -> None:
        assert type(value) is Array
        assert value.dtype == self.dtype
        self.data[checked_index(index, self.ndim)] = value.data


def checked_index(index: Any, ndim: int) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        assert part is Ellipsis or type(part) in (int, slice), f"an index of {type(part)}"
        assert not isinstance(part, slice) or (part.step or 1) > 0
    assert Ellipsis in parts or len(parts) == ndim, "an index that leaves axes out without `...`"
    return index


def one_dtype(*values: Any) -> None:
    assert len({value.dtype for value in values if type(value) is Array}) < 2, "arrays of several dtypes"


def binary(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def method(self: Array, other: Any) -> Any:
        assert type(other) in (Array, *NUMBERS), f"an operand of {type(other)}"
        one_dtype(self, other)
        values = self.data, other.data if type(other) is Array else other
        return Array(np.asarray(function(*reversed(values) if reflected else values)))

    return method


def unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Array) -> Any:
        result = function(self.data)
        return Array(np.asarray(result)) if isinstance(result, np.ndarray | np.generic) else result

    return method


def checked(name: str) -> Callable[..., Any]:
    """Return the function of NumPy, which refuses what the standard's function of 2023.12 refuses."""
    signature = inspect.signature(getattr(Namespace, name))

    def function(*arguments: Any, **keywords: Any) -> Array:
        bound = signature.bind(None, *arguments, **keywords).arguments
        arrays = []
        for argument, value in list(bound.items())[1:]:  # the first is `self` of the protocol
            annotation = str(signature.parameters[argument].annotation)
            may_be_an_array = ("Array" in annotation and "Sequence" not in annotation) or name == "clip"
            if may_be_an_array:
                is_scalar = argument in SCALARS.get(name, ()) and type(value) in NUMBERS
                assert is_scalar or type(value) is Array, f"{name}: `{argument}` is {type(value)}"
            if argument not in NO_ONE_DTYPE.get(name, ()):
                arrays += value if isinstance(value, list | tuple) else [value]
        one_dtype(*arrays)
        assert any(type(value) is Array for value in arrays) or not {"x", "y"} <= {*bound}, f"{name} of scalars"
        keywords = {key: opened(value) for key, value in keywords.items()}
        return Array(np.asarray(getattr(np_compat, name)(*map(opened, arguments), **keywords)))

    return function


def opened(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(opened, value))
    return value.data if type(value) is Array else value


OPERATORS = "add sub mul truediv floordiv mod matmul and_ or_ xor rshift le lt ge gt eq ne"
for name in OPERATORS.split():
    method = name.rstrip("_")
    setattr(Array, f"__{method}__", binary(getattr(operator, name), reflected=False))
    if method not in ("le", "lt", "ge", "gt", "eq", "ne"):
        setattr(Array, f"__r{method}__", binary(getattr(operator, name), reflected=True))
for name, converted in {"neg": operator.neg, "invert": operator.invert, "bool": bool, "int": int}.items():
    setattr(Array, f"__{name}__", unary(converted))
Array.__float__ = unary(float)  # type: ignore[attr-defined]

minimal = types.ModuleType("minimal")
FUNCTIONS = [name for name in vars(Namespace) if callable(vars(Namespace)[name]) and name[0] != "_"]
for name in FUNCTIONS:
    setattr(minimal, name, checked(name))
for name in ("bool", "int32", "int64", "float32", "float64"):
    setattr(minimal, name, np.dtype(name))
minimal.__array_namespace_info__ = np_compat.__array_namespace_info__  # type: ignore[attr-defined]


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give the namespace or the class other attributes for some calls; it has none of those that are None."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        delattr(owner, name) if value is None else setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
