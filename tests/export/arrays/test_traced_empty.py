"""Arrays without an element: a traced function gives what array-api-strict gives, or is refused."""

from __future__ import annotations

from typing import Any

import array_api_strict
import numpy as np
import pytest
from graphs import run
from traced_calls import assert_all_same, expected_of, feeds_of, model_of
from traced_table import BINARY, OPERATORS, UNARY, Row

from sdpa_xp_export import TensorSpec, to_onnx

OF_TWO: dict[str, Row] = BINARY | OPERATORS | {"where": lambda xp, x, y: xp.where(x == y, x, y)}
OF_ONE: dict[str, Row] = {
    name: UNARY[name] for name in ("abs", "astype", "bitwise_invert", "exp", "logical_not")
} | {
    "reshape": lambda xp, x: tuple(
        xp.reshape(x, shape) for shape in ((0,), (-1,), (0, 5), (5, 0), (2, 0, 7), x.shape[::-1], x.shape)
    ),
    "sum": lambda xp, x: (xp.sum(x), xp.sum(x, axis=-1), xp.sum(x, axis=0, keepdims=True)),
    "concat": lambda xp, x: xp.concat([x, xp.ones((2, *x.shape[1:]), dtype=x.dtype)], axis=0),
    "broadcast_to": lambda xp, x: xp.broadcast_to(xp.sum(x), (0, 1)),
    "max": lambda xp, x: tuple(xp.max(x, axis=axis) for axis in range(x.ndim) if x.shape[axis]) or x,
    "matmul": lambda xp, x: xp.matmul(x, xp.matrix_transpose(x)),
}
"""Others are in test_empty_in_a_run.py."""


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "uint8", "float32"])
@pytest.mark.parametrize("shapes", [((0, 4), (4,)), ((3, 0), (1, 0)), ((0,), ()), ((2, 0, 3), (0, 1))])
def test_of_two_arrays(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> None:
    check(OF_TWO, *(np.ones(shape, dtype) for shape in shapes))


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint8", "float32"])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 3)])
def test_of_one_array(shape: tuple[int, ...], dtype: str) -> None:
    check(OF_ONE, np.ones(shape, dtype))


def check(rows: dict[str, Row], *arrays: np.ndarray) -> None:
    expected = expected_of(rows, *arrays)
    assert len(expected) > 4
    model, counted = model_of({name: rows[name] for name in expected}, *arrays)
    assert_all_same(expected, counted, run(model, feeds_of(*arrays)))


OVER_NOTHING: dict[str, tuple[Row, float]] = {
    "sum": (lambda xp, x: xp.sum(x, axis=-1), 0),
    "mean": (lambda xp, x: xp.mean(x, axis=-1), np.nan),
    "mean, a fixed axis too": (lambda xp, x: xp.mean(x, axis=(1, 2), keepdims=True), np.nan),
    "mean, all axes": (lambda xp, x: xp.mean(x), np.nan),
    "var": (lambda xp, x: xp.var(x, axis=-1, keepdims=True), np.nan),
    "var, corrected": (lambda xp, x: xp.var(x, axis=2, correction=1), np.nan),
    "std": (lambda xp, x: xp.std(x, axis=-1), np.nan),
    "max": (lambda xp, x: xp.max(x, axis=-1), -np.inf),
    "min": (lambda xp, x: xp.min(x, axis=-1), np.inf),
}
"""What each gives over an axis that is empty in a run. NumPy has no `max` and `min` of nothing."""


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_over_an_axis_that_is_empty_in_a_run(dtype: str) -> None:
    def layer(x: Any) -> dict[str, Any]:
        return {name: row(x.__array_namespace__(), x) for name, (row, _) in OVER_NOTHING.items()}

    model = to_onnx(layer, TensorSpec(dtype, ("B", 3, "L")))
    for name, output in run(model, {"x": np.ones((2, 3, 0), dtype)}).items():
        np.testing.assert_array_equal(output, np.full(output.shape, OVER_NOTHING[name][1]), name)
        assert output.size
    x = np.random.default_rng(0).standard_normal((2, 3, 7)).astype(dtype)
    for name, output in run(model, {"x": x}).items():
        expected = OVER_NOTHING[name][0](array_api_strict, array_api_strict.asarray(x.astype("float64")))
        assert output.shape == expected.shape
        np.testing.assert_allclose(
            output,
            np.asarray(expected),
            rtol=4 * np.finfo(dtype).eps,
            atol=1e-3 if dtype == "float16" else 1e-6,
        )
