"""What the namespace of a traced function offers: the calls by which each function meets each dtype.

A row is called with a namespace and its arguments, arrays (3, 4) or Python scalars, on array-api-strict and on
the values of a graph alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

Row = Callable[..., Any]


def _named(names: str) -> dict[str, Row]:
    return {name: lambda xp, *arguments, name=name: getattr(xp, name)(*arguments) for name in names.split()}


def _operators(names: str) -> dict[str, Row]:
    functions = {name.rstrip("_"): getattr(operator, name) for name in names.split()}
    return {f"__{name}__": lambda xp, *arguments, f=f: f(*arguments) for name, f in functions.items()}


BINARY: dict[str, Row] = _named(
    "add subtract multiply divide floor_divide remainder pow equal not_equal less less_equal greater"
    " greater_equal bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"
    " logical_and logical_or logical_xor maximum minimum atan2 copysign hypot logaddexp nextafter"
) | {
    "searchsorted": lambda xp, x, y: (
        xp.searchsorted(_sorted(xp, x), y),
        xp.searchsorted(_sorted(xp, x), y, side="right"),
    ),
    "where": lambda xp, x, y: xp.where(xp.asarray([[True], [False], [True]]), x, y),
    "clip": lambda xp, x, y: (xp.clip(x, y), xp.clip(x, None, y), xp.clip(x, max=y, min=y)),
    "result_type": lambda xp, x, y: xp.astype(xp.ones((2,)), xp.result_type(x, y)),
}
"""Functions of two arrays, one of which may be a Python scalar."""

JOINED: dict[str, Row] = {
    "matmul": lambda xp, x, y: xp.matmul(x, xp.matrix_transpose(y)),
    "__matmul__": lambda xp, x, y: x @ y.mT,
    "concat": lambda xp, x, y: (xp.concat([x, y], axis=-1), xp.concat((x, y, x), axis=None)),
    "stack": lambda xp, x, y: (xp.stack([x, y], axis=-1), xp.stack([x, y])),
    "vecdot": lambda xp, x, y: (xp.vecdot(x, y), xp.vecdot(x, y[:1, :], axis=-2)),
    "tensordot": lambda xp, x, y: (
        xp.tensordot(x, y),
        xp.tensordot(x, y, axes=0),
        xp.tensordot(x, y.mT, axes=1),
        xp.tensordot(x, y, axes=((1,), (1,))),
        xp.tensordot(x[None, :, :], y, axes=((-1, 1), (1, 0))),
    ),
    "isin": lambda xp, x, y: (xp.isin(x, y), xp.isin(y[0, :], x)),
}
"""Functions of two arrays alone."""

OPERATORS = _operators("add sub mul truediv floordiv mod pow lshift rshift and_ or_ xor eq ne lt le gt ge")

_OPERATORS = [name for name in OPERATORS if hasattr(operator, f"__i{name[2:]}")] + ["__matmul__"]


def _in_place(name: str) -> Row:
    """The row of an operator in place, on a copy of its first operand; beside a scalar it is reflected."""
    apply = getattr(operator, name)

    def row(xp: Any, x: Any, y: Any) -> Any:
        one = xp.asarray(x, copy=True) if hasattr(x, "dtype") else x
        return apply(one[:, :3], y[:, :3]) if name == "__imatmul__" else apply(one, y)

    return row


IN_PLACE: dict[str, Row] = {f"__i{name[2:]}": _in_place(f"__i{name[2:]}") for name in _OPERATORS}
"""Operators whose result takes the place of their first operand."""


def _sorted(xp: Any, x: Any) -> Any:
    """The numbers of an array in order; a scalar has none."""
    if not hasattr(x, "dtype"):
        raise TypeError("what is searched must be an array")
    return xp.sort(xp.reshape(x, (-1,)))


def _by(name: str, *keywords: dict[str, Any]) -> Row:
    """The row of a function with each of these keywords."""
    return lambda xp, x: tuple(getattr(xp, name)(x, **told) for told in keywords)


def _over_axes(name: str) -> Row:
    whole = _by(name, {}, {"axis": 0}, {"axis": (0, 1), "keepdims": True})
    return lambda xp, x: (*whole(xp, x), getattr(xp, name)(x[:0, :], axis=0))


def _over_axis(name: str) -> Row:
    return _by(name, {}, {"axis": 0}, {"axis": -1, "keepdims": True}, {"keepdims": True})


def _accumulated(name: str) -> Row:
    return lambda xp, x: (
        *_by(name, {"axis": 1}, {"axis": -2, "include_initial": True})(xp, x),
        *_by(name, {"axis": 0, "dtype": xp.float64}, {"axis": 0, "dtype": xp.int16})(xp, x),
        getattr(xp, name)(xp.reshape(x, (-1,))),
        getattr(xp, name)(x[:, :0], axis=1, include_initial=True),
    )


def _sorting(name: str) -> Row:
    return lambda xp, x: tuple(
        getattr(xp, name)(y, axis=axis)
        for y, axis in ((x, -1), (x, 0), (xp.concat([x, x], axis=1), -1), (x[:0, :], -1), (x[:, :0], -1))
    )


def _of_repeated(name: str) -> Row:
    """NumPy orders the NaNs at will, so there are none."""
    return lambda xp, x: tuple(getattr(xp, name)(xp.concat([xp.where(x == x, x, x[:1, :1]), x[:, :2]], axis=1)))


UNARY: dict[str, Row] = (
    _named(
        "abs negative positive square floor exp log sqrt tanh sin cos bitwise_invert logical_not"
        " mean max min var std matrix_transpose ones_like zeros_like acos acosh asin asinh atan atanh ceil"
        " conj cosh expm1 isfinite isinf isnan log10 log1p log2 real reciprocal round sign signbit sinh tan"
        " trunc"
    )
    | _operators("neg pos abs invert")
    | {
        "sum": lambda xp, x: (
            xp.sum(x),
            xp.sum(x, axis=-1),
            xp.sum(x, axis=(0, 1), keepdims=True),
            xp.sum(x, axis=()),
            *(xp.sum(x, axis=0, dtype=getattr(xp, dtype)) for dtype in ("float64", "int64", "uint8", "int32")),
        ),
        "mean": lambda xp, x: (xp.mean(x), xp.mean(x, axis=0), xp.mean(x, axis=(1, 0), keepdims=True)),
        **{name: _by(name, {}, {"axis": 0}, {"axis": -1, "keepdims": True}) for name in ("max", "min")},
        "var": lambda xp, x: (xp.var(x, axis=1), xp.var(x, correction=1.5), xp.var(x, axis=0, keepdims=True)),
        "std": lambda xp, x: (xp.std(x, axis=1), xp.std(x, correction=1), xp.std(x, axis=0, keepdims=True)),
        "take": lambda xp, x: (
            xp.take(x, xp.asarray([3, 0, 0], dtype=xp.uint8), axis=1),
            xp.take(x, xp.asarray([2, 1], dtype=xp.int32), axis=-2),
            xp.take(xp.reshape(x, (12,)), xp.asarray([11, 0], dtype=xp.uint64)),
        ),
        "reshape": lambda xp, x: (xp.reshape(x, (2, -1)), xp.reshape(x, (-1,)), xp.reshape(x, (3, 2, 2))),
        "permute_dims": lambda xp, x: xp.permute_dims(x[None, :, :], (2, 0, -2)),
        "moveaxis": lambda xp, x: (
            xp.moveaxis(x[None, :, :], 0, -1),
            xp.moveaxis(x[None, :, :], (0, -1), (1, 0)),
        ),
        "expand_dims": lambda xp, x: (xp.expand_dims(x, axis=-1), xp.expand_dims(x, axis=1)),
        "squeeze": lambda xp, x: (xp.squeeze(x[:, None, :1], axis=(1, -1)), xp.squeeze(x[:, None, :], axis=-2)),
        "broadcast_to": lambda xp, x: xp.broadcast_to(x[:1, :], (2, 3, 4)),
        "unstack": lambda xp, x: (*xp.unstack(x), *xp.unstack(x, axis=-1)),
        "__getitem__": lambda xp, x: (x[-1, ...], x[:, 1:3], x[..., ::-2], x[0, 3], x[None, 1:, None, -2]),
        "__iter__": lambda xp, x: tuple(x[1, :]),
        "mT": lambda xp, x: x.mT,
        "astype": lambda xp, x: tuple(
            xp.astype(x, getattr(xp, dtype))
            for dtype in ("bool", "int8", "int64", "uint16", "uint64", "float32", "float64")
        ),
        "asarray": lambda xp, x: (
            xp.asarray(x),
            xp.asarray(x, dtype=x.dtype, copy=False),
            xp.astype(xp.asarray([1, 0, 3]), x.dtype) + x[0, :3],
        ),
        "full": lambda xp, x: (
            xp.full((2, 3), 1, dtype=x.dtype) + x[:2, :3],
            x + xp.full(4, True, dtype=x.dtype),
        ),
        "ones": lambda xp, x: xp.ones((3, 1), dtype=x.dtype) * x,
        "zeros": lambda xp, x: xp.zeros(4, dtype=x.dtype) + x,
        "ones_like": lambda xp, x: (xp.ones_like(x), xp.ones_like(x, dtype=xp.int16)),
        "zeros_like": lambda xp, x: (xp.zeros_like(x), xp.zeros_like(x, dtype=xp.bool)),
        "arange": lambda xp, x: x + xp.arange(1, 9, 2, dtype=x.dtype),
        **{name: _over_axes(name) for name in ("all", "any", "count_nonzero")},
        "prod": lambda xp, x: (
            xp.prod(x[:, :2], axis=1),
            xp.prod(x, axis=0, keepdims=True),
            xp.prod(x, axis=()),
            *(xp.prod(x[:2, :], axis=0, dtype=getattr(xp, dtype)) for dtype in ("float64", "uint8", "int32")),
        ),
        **{name: _accumulated(name) for name in ("cumulative_sum", "cumulative_prod")},
        "diff": lambda xp, x: (
            xp.diff(x),
            xp.diff(x, axis=0, n=2),
            xp.diff(x, prepend=x[:, :2], append=x[:, :1]),
        ),
        **{name: _over_axis(name) for name in ("argmax", "argmin")},
        **{name: _sorting(name) for name in ("sort", "argsort")},
        **{name: _of_repeated(name) for name in ("unique_all", "unique_counts", "unique_inverse")},
        "unique_values": lambda xp, x: xp.unique_values(xp.concat([x, x])),
        "nonzero": lambda xp, x: (*xp.nonzero(x), *xp.nonzero(x[0, :])),
        "take_along_axis": lambda xp, x: (
            xp.take_along_axis(x, xp.asarray([[3, 0, -1], [1, 1, 2], [0, 0, 0]])),
            xp.take_along_axis(x, xp.asarray([[2, -3, 1, 0]], dtype=xp.int32), axis=0),
        ),
        "flip": lambda xp, x: (xp.flip(x), xp.flip(x, axis=-1), xp.flip(x, axis=(0, 1))),
        "roll": lambda xp, x: (
            xp.roll(x, 1),
            xp.roll(x, -6, axis=1),
            xp.roll(x, (1, 5), axis=(0, -1)),
            xp.roll(x, 2, axis=(0, 1)),
        ),
        "repeat": lambda xp, x: (
            xp.repeat(x, 2),
            xp.repeat(x, 3, axis=0),
            xp.repeat(x, 0, axis=1),
            xp.repeat(x, xp.asarray([2, 0, 1, 3]), axis=-1),
            xp.repeat(x, xp.asarray([2]), axis=0),
        ),
        "tile": lambda xp, x: (xp.tile(x, (2, 1)), xp.tile(x, (3,)), xp.tile(x, (2, 1, 2)), xp.tile(x, (0, 1))),
        "tril": lambda xp, x: (xp.tril(x), xp.tril(x, k=1), xp.tril(x[None, :, :], k=-2)),
        "triu": lambda xp, x: (xp.triu(x), xp.triu(x, k=1), xp.triu(x[None, :, :], k=-2)),
        "empty": lambda xp, x: x + xp.zeros_like(xp.empty(4, dtype=x.dtype)),
        "empty_like": lambda xp, x: (
            xp.zeros_like(xp.empty_like(x)),
            xp.zeros_like(xp.empty_like(x, dtype=xp.int8)),
        ),
        "eye": lambda xp, x: xp.eye(3, 4, k=1, dtype=x.dtype) + x,
        "full_like": lambda xp, x: (xp.full_like(x, 1), xp.full_like(x, 1, dtype=xp.int16)),
        "linspace": lambda xp, x: x + xp.linspace(0, 3, 4, dtype=x.dtype),
        "from_dlpack": lambda xp, x: xp.from_dlpack(x),
        "isdtype": lambda xp, x: (
            xp.zeros_like(x, dtype=xp.int8)
            + sum(xp.isdtype(x.dtype, kind) for kind in ("bool", "integral", ("real floating", xp.int8)))
        ),
        "finfo": lambda xp, x: x * xp.finfo(x).eps + xp.finfo(x.dtype).max,
        "iinfo": lambda xp, x: x * 0 + xp.iinfo(x).max - xp.iinfo(x.dtype).bits,
        "masked": lambda xp, x: (x[x == x], x[x[:, 0] == x[1, 0]]),
        "at": lambda xp, x: (x[xp.asarray([0, -1, 1]), xp.asarray([[3], [0]])], x[xp.asarray([0, 2]), 1]),
        "T": lambda xp, x: x.T,
        "size": lambda xp, x: xp.full((3, 2), x.size) + xp.astype(x[:, :2] == x[:, :2], xp.int64),
        "broadcast_arrays": lambda xp, x: xp.broadcast_arrays(
            x, x[:1, :], xp.ones((2, 1, 1), dtype=xp.int8), x[:, :1]
        ),
        "broadcast_shapes": lambda xp, x: (
            xp.zeros_like(x, dtype=xp.int8)
            + xp.ones(xp.broadcast_shapes(x.shape, (1,), x[:1, :].shape), dtype=xp.int8)
        ),
        "meshgrid": lambda xp, x: (
            *xp.meshgrid(x[0, :], x[:, 1]),
            *xp.meshgrid(x[0, :], x[1, :2], x[:, 1], indexing="ij"),
            *xp.meshgrid(x[0, :]),
        ),
        "can_cast": lambda xp, x: tuple(
            x == xp.asarray(xp.can_cast(x, dtype)) for dtype in (xp.int16, xp.float64, xp.bool, x.dtype)
        ),
    }
)
"""Functions of one array, also those that make another beside it."""

NO_FUNCTIONS = {"T", "at", "mT", "masked", "size"}
"""Rows of attributes and indices."""

BESIDE_THE_STANDARD = {"erf", "is_masked"}
"""Functions that array-api-strict lacks; they have tests of their own."""

ULPS = {
    **dict.fromkeys(("exp", "log", "tanh", "sin", "cos"), 4),
    **dict.fromkeys(("pow", "__pow__", "__ipow__"), 4),
    **dict.fromkeys(("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "tan", "atan2"), 4),
    **dict.fromkeys(("expm1", "log1p", "log2", "log10", "logaddexp", "hypot"), 4),
    **dict.fromkeys(("prod", "cumulative_prod", "cumulative_sum", "tensordot", "vecdot", "linspace"), 8),
    **dict.fromkeys(("mean", "sum", "var", "std", "matmul", "__matmul__", "__imatmul__"), 8),
}
"""Units in the last place, of the largest number of the result, that it may be off by; others are exact."""

SIGN_OF_ZERO = {"where", "maximum", "minimum", "clip"}
SIGN_OF_ZERO |= {"unique_all", "unique_counts", "unique_inverse", "unique_values"}
"""Functions whose zeros may have another sign: onnxruntime's Where makes 0 of -0 where the condition holds."""

SIGN_OF_NAN = {"copysign", "floor_divide", "remainder", "__floordiv__", "__mod__", "__ifloordiv__", "__imod__"}
"""Functions whose NaNs may have another sign, which ONNX cannot read."""

COUNTED = {"pow", "__pow__", "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"}
COUNTED |= {"__ipow__", "__ilshift__", "__irshift__"}
"""Functions whose second integers must not be below 0, which the standard leaves undefined."""

DIVIDED = {"floor_divide", "remainder", "__floordiv__", "__mod__", "__ifloordiv__", "__imod__"}
"""Functions that refuse a Python 0 as the divisor of integers; in an array it gives 0, as in NumPy."""

TAKES_MORE = {"sum": ("bool",), "isin": ("bool", "float32", "float64")}
"""Functions that take more dtypes than array-api-strict, as NumPy does: a sum counts conditions."""


def refused_here(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a call is refused that array-api-strict answers with a warning, or with what is undefined."""
    if (
        len(arguments) < 2
        or not isinstance(arguments[1], int)
        or "int" not in str(getattr(arguments[0], "dtype", ""))
    ):
        return False
    return (name in COUNTED and arguments[1] < 0) or (name in DIVIDED and arguments[1] == 0)
