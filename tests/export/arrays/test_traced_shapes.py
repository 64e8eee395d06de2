"""Shapes of what a layer computes, as the graph states them, and lengths that are made on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np
import pytest
from graphs import run

from sdpa_xp_export import TensorSpec, to_onnx

X = TensorSpec("float32", ("B", "L", 7))
SIZES = {"B": 3, "L": 5}


def both(function: Callable[[Any, Any], Any]) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """What onnxruntime and NumPy make of a function, and the shape that the graph states."""

    def layer(x: Any) -> Any:
        return function(array_api_compat.array_namespace(x), x)

    x = np.random.default_rng(2).standard_normal((3, 5, 7)).astype(np.float32)
    model = to_onnx(layer, X)
    (output,) = model.graph.output
    stated = [axis.dim_param or axis.dim_value for axis in output.type.tensor_type.shape.dim]
    return run(model, {"x": x})["output"], np.asarray(layer(x)), stated


REDUCTIONS = ("sum", "mean", "max", "min", "var", "std")
AXES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "all": ({}, []),
    "last": ({"axis": -1}, ["B", "L"]),
    "first": ({"axis": 0}, ["L", 7]),
    "two": ({"axis": (0, -1)}, ["L"]),
    "kept": ({"axis": 1, "keepdims": True}, ["B", 1, 7]),
    "all kept": ({"keepdims": True}, [1, 1, 1]),
}


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, axes: str) -> None:
    keywords, stated = AXES[axes]
    corrections: list[dict[str, Any]] = [{}, {"correction": 1}] if name in ("var", "std") else [{}]
    for more in corrections:
        result, expected, shape = both(lambda xp, x, more=more: getattr(xp, name)(x, **keywords, **more))
        assert (result.shape, shape) == (expected.shape, stated)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, x: xp.astype(xp.arange(x.shape[1]), xp.float32),
        lambda xp, x: xp.astype(xp.arange(1, x.shape[1]), xp.float32),
        lambda xp, x: xp.astype(xp.arange(0, x.shape[1], 2), xp.float32),
        lambda xp, x: xp.astype(xp.arange(x.shape[0] + x.shape[1]), xp.float32),
    ],
)
def test_a_range_has_a_length_of_its_own(function: Callable[[Any, Any], Any]) -> None:
    """What is made of it can be joined, and made as long as it is."""

    def joined(xp: Any, x: Any) -> Any:
        numbers = function(xp, x)
        return xp.concat([numbers, xp.zeros(numbers.shape, dtype=xp.float32), x[0, 0, :]])

    for some_function in (function, joined):
        result, expected, _ = both(some_function)
        np.testing.assert_array_equal(result, expected)
