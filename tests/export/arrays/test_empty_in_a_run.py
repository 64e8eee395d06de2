"""Each function of the namespace on axes that are open, and of length 0 in a run: it gives what NumPy gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import array_api_strict
import numpy as np
import pytest
from graphs import run
from internals import GraphValue
from internals import graph_namespace as namespace

from sdpa_xp_export import TensorSpec, to_onnx

Row = Callable[[Any, Any], Any]


def named(names: str, call: Callable[[Any, Any, Callable[..., Any]], Any]) -> dict[str, Row]:
    return {name: lambda xp, x, name=name: call(xp, x, getattr(xp, name)) for name in names.split()}


def flat(xp: Any, x: Any) -> Any:
    return xp.reshape(x, (-1,))


def two(x: Any) -> Any:
    """An array with at least two axes."""
    return x if x.ndim > 1 else x[None, :]


ROWS: dict[str, Row] = (
    named(
        "abs acos acosh asin asinh atan atanh bitwise_invert ceil conj cos cosh empty_like exp expm1 "
        "floor isfinite isinf isnan log log10 log1p log2 logical_not negative nonzero ones_like positive "
        "real reciprocal round sign signbit sin sinh sqrt square tan tanh trunc unique_all unique_counts "
        "unique_inverse unique_values zeros_like asarray from_dlpack",
        lambda xp, x, f: f(x),
    )
    | named(
        "add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign "
        "divide equal floor_divide greater greater_equal hypot isin less less_equal logaddexp logical_and "
        "logical_or logical_xor maximum minimum multiply nextafter not_equal pow remainder subtract "
        "vecdot broadcast_arrays",
        lambda xp, x, f: f(x, x),
    )
    | named(
        "all any argmax argmin count_nonzero max mean min prod std sum var",
        lambda xp, x, f: (f(x), f(x, axis=0), f(x, axis=-1, keepdims=True)),
    )
    | named("argsort diff flip sort", lambda xp, x, f: (f(x), f(x, axis=0), f(x, axis=-1)))
    | named(
        "cumulative_prod cumulative_sum",
        lambda xp, x, f: (f(x, axis=0), f(x, axis=-1, include_initial=True), f(flat(xp, x))),
    )
    | named("matrix_transpose tril triu", lambda xp, x, f: f(two(x)))
    | {
        "arange": lambda xp, x: (xp.arange(x.shape[0]), xp.arange(1, x.shape[0]), xp.arange(0, x.shape[0], 2)),
        "astype": lambda xp, x: xp.astype(x, xp.int16),
        "broadcast_shapes": lambda xp, x: xp.full(xp.broadcast_shapes(x.shape, (1,)), 2, dtype=xp.int8),
        "broadcast_to": lambda xp, x: xp.broadcast_to(x, (2, *x.shape)),
        "clip": lambda xp, x: xp.clip(x, x, x),
        "concat": lambda xp, x: (xp.concat([x, x]), xp.concat([x, x], axis=-1), xp.concat([x, x], axis=None)),
        "empty": lambda xp, x: xp.zeros_like(xp.empty(x.shape, dtype=xp.int8)),
        "expand_dims": lambda xp, x: (xp.expand_dims(x, axis=0), xp.expand_dims(x, axis=-1)),
        "eye": lambda xp, x: (xp.eye(x.shape[0], dtype=xp.int8), xp.eye(x.shape[0], 3, k=1, dtype=xp.int8)),
        "full": lambda xp, x: xp.full(x.shape, 2, dtype=xp.int8),
        "full_like": lambda xp, x: xp.full_like(x, 1),
        "linspace": lambda xp, x: (
            xp.linspace(0.0, 1.0, x.shape[0], dtype=xp.float64),
            xp.linspace(0.0, 1.0, x.shape[0], dtype=xp.float64, endpoint=False),
        ),
        "matmul": lambda xp, x: (two(x) @ two(x).mT, two(x).mT @ two(x), x[0:0] @ two(x[0:0]).mT),
        "meshgrid": lambda xp, x: xp.meshgrid(flat(xp, x), xp.arange(3), flat(xp, x), indexing="ij"),
        "moveaxis": lambda xp, x: xp.moveaxis(x, 0, -1),
        "ones": lambda xp, x: xp.ones((2, *x.shape), dtype=xp.int8),
        "permute_dims": lambda xp, x: xp.permute_dims(x, tuple(range(x.ndim))[::-1]),
        "repeat": lambda xp, x: (xp.repeat(x, 2), xp.repeat(x, 3, axis=-1), xp.repeat(x, 0, axis=0)),
        "repeat, as often as a length": lambda xp, x: xp.repeat(xp.arange(3), x.shape[0]),
        "repeat, by an array": lambda xp, x: xp.repeat(x, xp.arange(x.shape[0]), axis=0),
        "reshape": lambda xp, x: tuple(
            xp.reshape(x, shape)
            for shape in ((-1,), (-1, 3), (1, *x.shape), (*x.shape, 1), x.shape[::-1], (x.size,))
        ),
        "reshape, back": lambda xp, x: xp.reshape(flat(xp, x), x.shape),
        "roll": lambda xp, x: (xp.roll(x, 1), xp.roll(x, -2, axis=-1), xp.roll(x, (3,), axis=(0,))),
        "searchsorted": lambda xp, x: (
            xp.searchsorted(xp.sort(flat(xp, x)), flat(xp, x)),
            xp.searchsorted(xp.sort(flat(xp, x)), xp.asarray([1, 2], dtype=x.dtype), side="right"),
        ),
        "squeeze": lambda xp, x: xp.squeeze(x[None, ...], axis=0),
        "stack": lambda xp, x: (xp.stack([x, x]), xp.stack([x, x], axis=-1)),
        "take": lambda xp, x: (
            xp.take(x, xp.arange(x.shape[0]), axis=0),
            xp.take(xp.arange(3), xp.arange(x.shape[0])[:3]),
            xp.take(x, xp.asarray([], dtype=xp.int64), axis=-1),
        ),
        "take_along_axis": lambda xp, x: xp.take_along_axis(x, xp.argsort(x, axis=-1), axis=-1),
        "tensordot": lambda xp, x: (
            xp.tensordot(x, x, axes=0),
            xp.tensordot(x, x, axes=((0,), (0,))),
            xp.tensordot(x, x, axes=(tuple(range(x.ndim)),) * 2),
        ),
        "tile": lambda xp, x: (xp.tile(x, (2,) * x.ndim), xp.tile(x, (3, *(1,) * x.ndim))),
        "where": lambda xp, x: (xp.where(x == x, x, x), xp.where(x == x, x != x, x == x)),
        "zeros": lambda xp, x: xp.zeros(x.shape, dtype=xp.int8),
        "T": lambda xp, x: two(x).mT,
        "[]": lambda xp, x: (x[::-1], x[1:], x[..., :-1], x[::2], x[: x.shape[0] // 2], x[x.shape[0] // 2 :]),
        "[mask]": lambda xp, x: (x[x == x], x[x != x], xp.zeros(x[x == x].shape[0], dtype=xp.int8)),
        "[array]": lambda xp, x: x[xp.arange(x.shape[0])],
        "shape": lambda xp, x: (xp.asarray(x.shape[0]), xp.asarray(x.size)),
    }
)
NO_ARRAYS = {"can_cast", "finfo", "iinfo", "isdtype", "result_type", "__array_namespace_info__"}
OTHERS = NO_ARRAYS | {
    "e",
    "inf",
    "nan",
    "newaxis",
    "pi",
    *namespace.__array_namespace_info__().dtypes(),
    "bfloat16",
    "float16",
}
KNOWN_LENGTH = {"unstack"}
"""Functions of an axis whose length is known."""
BESIDE_THE_STANDARD = {"erf", "is_masked"}
SHAPES = [
    (("N",), {"N": 0}),
    (("N", 3), {"N": 0}),
    ((3, "N"), {"N": 0}),
    (("N", "M"), {"N": 2, "M": 0}),
    (("N", "M"), {"N": 0, "M": 2}),
    (("N", "M"), {"N": 0, "M": 0}),
    (("N", "M", 2), {"N": 3, "M": 0}),
]


def test_each_function_has_a_row() -> None:
    assert {*namespace.__all__} - OTHERS - KNOWN_LENGTH - BESIDE_THE_STANDARD - {*ROWS} == set()


def expected(row: Row, x: np.ndarray) -> list[np.ndarray] | None:
    """What NumPy gives, or array-api-strict where NumPy has another name; None if both refuse."""
    for xp, array in ((np, x), (array_api_strict, array_api_strict.asarray(x))):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = row(xp, array)
            return [np.asarray(x) for x in (results if isinstance(results, tuple | list) else [results])]
        except (TypeError, ValueError, IndexError, AttributeError):
            continue
    return None


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("name", ROWS)
def test_an_open_axis_without_an_element(name: str, dtype: str) -> None:
    for shape, lengths in SHAPES:
        x = np.ones([lengths.get(length, length) for length in shape], dtype)  # type: ignore[arg-type]
        results = expected(ROWS[name], x)
        if results is not None:
            compare(name, ROWS[name], TensorSpec(dtype, shape), x, results)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ROWS)
def test_a_selection_of_no_element(name: str) -> None:
    x = np.ones(4, np.float32)
    results = expected(ROWS[name], x[:0])
    if results is not None:
        compare(name, lambda xp, x: ROWS[name](xp, x[x > 1]), TensorSpec("float32", ("N",)), x, results)


def compare(name: str, row: Row, spec: TensorSpec, x: np.ndarray, results: list[np.ndarray]) -> None:
    def layer(x: Any) -> dict[str, Any]:
        ys = row(x.__array_namespace__(), x)
        ys = ys if isinstance(ys, tuple | list) else [ys]
        return {f"output {n}": y if isinstance(y, GraphValue) else x.graph.operand(y) for n, y in enumerate(ys)}

    try:
        model = to_onnx(layer, spec)
    except (TypeError, ValueError) as error:  # of a dtype that the standard leaves undefined, or too few axes
        assert "dtype" in str(error) or "axes" in str(error), (name, spec)  # noqa: PT017
        return
    for output, result in zip(run(model, {"x": x}).values(), results, strict=True):
        np.testing.assert_array_equal(output, result.astype(output.dtype), f"{name} of {spec}")
