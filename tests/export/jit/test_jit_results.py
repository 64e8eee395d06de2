"""What a layer returns comes back from `jit` as it is: structures, None, numbers, constants, and dtypes."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from sdpa_xp_export import TensorSpec, jit, to_onnx, verify_layer


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    hidden: Any
    cache: Any = None


@dataclass
class Doubling:
    value: Any

    def __post_init__(self) -> None:
        self.value = self.value * 2


RESULTS: dict[str, Callable[[Any], Any]] = {
    "None": lambda x: (x + 1, None),
    "numbers": lambda x: (x + 1, 3, 0.5, True, np.float32(2)),
    "text": lambda x: {"y": x + 1, "name": "layer"},
    "nested": lambda x: (x + 1, (x * 2, [x * 3, {"k": x * 4, "none": None}])),
    "cache of a decoder": lambda x: {"output": x + 1, "cache": ((x, x * 2), (x * 3, x * 4))},
    "NamedTuple": lambda x: Pair(x + 1, Pair(None, x * 2)),
    "dataclass": lambda x: Output(x + 1, (x * 2, None)),
    "a dataclass that computes": lambda x: Doubling(x + 1),
    "another dictionary": lambda x: collections.OrderedDict(a=x + 1, b=x * 2),
    "a default": lambda x: collections.defaultdict(list, a=x + 1),
    "empty structures": lambda x: (x + 1, (), {}, []),
    "the argument": lambda x: (x, x),
    "a length": lambda x: (x + 1, x.shape[0], x.shape[0] // 2, x.shape[0] / 4),
    "a constant of NumPy": lambda x: (x + 1, np.arange(3)),
    "a list of one": lambda x: [x + 1],
}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert [*one] == [*other]
        assert_same([*one.values()], [*other.values()])
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        [assert_same(*pair) for pair in zip(one, other, strict=True)]
    elif isinstance(one, Output | Doubling):
        assert_same(vars(one), vars(other))
    else:
        assert one == other


@pytest.mark.parametrize("name", RESULTS)
def test_structures(name: str) -> None:
    layer = RESULTS[name]
    fast = jit(layer, verify=True)
    for length in (2, 5):
        x = np.ones((length, 3), np.float32)
        assert_same(fast(x), layer(x))
    assert len(fast.models) == 1


def test_names_of_outputs_within_structures() -> None:
    names = {
        "nested": ["output_0", "output_1_0", "output_1_1_0", "output_1_1_1_k"],
        "cache of a decoder": ["output", "cache_0_0", "cache_0_1", "cache_1_0", "cache_1_1"],
        "NamedTuple": ["first", "second_second"],
        "dataclass": ["hidden", "cache_0"],
        "a length": ["output_0", "output_1", "output_2", "output_3"],
    }
    for name, expected in names.items():
        model = to_onnx(RESULTS[name], TensorSpec("float32", ("N", 3)))
        assert [value.name for value in model.graph.output] == expected
        assert verify_layer(model, RESULTS[name], seed=0).agrees


def own_numbers(xp: Any, x: Any) -> dict[str, Any]:
    return {
        "asarray": x * xp.asarray(0.1),
        "list": x * xp.asarray([0.1, 0.2, 0.3]),
        "full": x * xp.full((3,), 0.1),
        "linspace": x * xp.linspace(0.1, 0.7, 3),
        "arange": x * xp.arange(0.1, 0.35, 0.1),
        "zeros": xp.zeros(3),
        "integers": xp.arange(3) + xp.asarray(2),
        "where": xp.where(x > 0, xp.asarray(0.1), xp.asarray(0.3)),
        "Python": x * 0.1,
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["numpy", "array_api_strict", "torch", "jax.numpy", "mlx.core"])
def test_numbers_of_the_layer_have_the_dtypes_of_its_library(name: str, dtype: str) -> None:
    xp: Any = pytest.importorskip(name)
    if dtype == "float64" and name in ("jax.numpy", "mlx.core"):
        pytest.skip("the library computes no float64 by default")
    x = xp.asarray([1.0, 2.0, 3.0], dtype=getattr(xp, dtype))
    result = jit(lambda x: own_numbers(x.__array_namespace__(), x))(x)
    for key, value in own_numbers(xp, x).items():
        assert type(result[key]) is type(value), key
        assert result[key].dtype == value.dtype, key
        close = 1e-15 if "64" in str(value.dtype) else 1e-6
        np.testing.assert_allclose(np.asarray(result[key]), np.asarray(value), rtol=close, err_msg=key)


@pytest.mark.needs("torch")
def test_the_default_dtype_of_torch() -> None:
    import torch

    torch.set_default_dtype(torch.float64)
    try:
        result = jit(lambda x: x * x.__array_namespace__().asarray([0.1, 0.2, 0.3]))(torch.ones(3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.dtype == torch.float64
    assert result.tolist() == [0.1, 0.2, 0.3]


def test_a_float64_of_numpy_is_one_beside_numpy_arrays() -> None:
    layers = (lambda x: x * np.sqrt(8), lambda x: np.sqrt(8) - x, lambda x: np.add(x, np.sqrt(8)))
    for layer, dtype in itertools.product(layers, (np.float16, np.float32, np.float64)):
        x = np.ones(3, dtype)
        result = jit(layer)(x)
        assert result.dtype == np.float64
        np.testing.assert_array_equal(result, layer(x))
    torch = pytest.importorskip("torch")
    assert jit(lambda x: x * np.sqrt(8))(torch.ones(3)).dtype == torch.float32


def test_a_file_of_float64_keeps_it_in_numbers_that_the_layer_makes() -> None:
    def layer(x: Any) -> Any:
        return x * x.__array_namespace__().asarray(0.1)

    for dtype in ("float32", "float64"):
        model = to_onnx(layer, TensorSpec(dtype, ("N",)))
        assert verify_layer(model, layer, seed=0).agrees
        assert {tensor.data_type for tensor in model.graph.initializer} == {1 if dtype == "float32" else 11}


@pytest.mark.needs("torch")
def test_every_dtype_of_an_output_on_torch() -> None:
    import torch

    names = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    for name in (*names, "float16", "bfloat16", "float32", "float64"):
        result = jit(lambda x, dtype: x.__array_namespace__().astype(x, dtype))(
            torch.ones(3), getattr(torch, name)
        )
        assert result.dtype == getattr(torch, name)
        assert result.to(torch.float64).sum() == 3


def test_an_output_of_uint64_goes_to_torch() -> None:
    torch = pytest.importorskip("torch")
    result = jit(lambda x: x.__array_namespace__().cumulative_sum(x))(np.ones(3, np.uint8))
    assert torch.from_numpy(result).tolist() == [1, 2, 3]
