"""What the table of dtypes has no row for: half precision, scalars, lengths, and products of float64."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import array_api_compat
import graphs
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from traced_table import BINARY, OPERATORS, UNARY

from sdpa_xp_export import TensorSpec, to_onnx

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ROWS = [[0.0, 1.0, -1.5, 2.5], [-7.0, 0.125, 3.0, 1e-3], [np.inf, -np.inf, np.nan, 5.0]]
NUMBERS = np.asarray(ROWS, np.float32)


def run(model: onnx.ModelProto, *arrays: np.ndarray) -> list[np.ndarray]:
    names = [graph_input.name for graph_input in model.graph.input]
    return [*graphs.run(model, dict(zip(names, arrays, strict=True))).values()]


def traced(function: Callable[..., Any], *arrays: np.ndarray, **keywords: Any) -> list[np.ndarray]:
    """What onnxruntime makes of `function`, exported for arrays like these."""
    specs = [TensorSpec(array.dtype.name, array.shape) for array in arrays]
    return run(to_onnx(function, *specs, **keywords), *arrays)


ARITHMETIC = ["add", "subtract", "multiply", "divide", "remainder", "floor_divide", "maximum", "minimum"]
ARITHMETIC += ["where", "abs", "negative", "square", "floor", "sqrt", "max", "min", "__add__", "__sub__"]
ARITHMETIC += ["__mul__", "__truediv__", "__floordiv__", "__mod__", "__neg__", "__abs__"]
COMPARED = [
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "__eq__",
    "__ne__",
    "__lt__",
]
COMPARED += ["__le__", "__gt__", "__ge__"]
MOVED = ["take", "reshape", "permute_dims", "moveaxis", "expand_dims", "squeeze", "broadcast_to", "unstack"]
MOVED += ["__getitem__", "mT"]
CLOSE = ["exp", "log", "tanh", "sin", "cos", "mean", "sum", "var", "std", "pow", "__pow__"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", [*ARITHMETIC, *COMPARED, *MOVED, *CLOSE])
def test_half_precision_is_float32_rounded(half: str, name: str) -> None:
    """Each function gives what it gives in float32, rounded once; that is what NumPy has for float16."""
    row = (BINARY | OPERATORS | UNARY)[name]
    count = 2 if name in BINARY or name in OPERATORS else 1
    x, y = (numbers.astype(HALVES[half]) for numbers in (NUMBERS, NUMBERS[::-1] * 0.75))
    kinds: list[str] = []

    def function(x: Any, y: Any) -> dict[str, Any]:
        xp = x.__array_namespace__()
        arrays = [xp.astype(array, half) for array in (x, y)][:count]
        outputs = row(xp, *arrays)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        kinds.extend(output.dtype for output in outputs)
        return {
            f"output {number}": xp.astype(output, xp.float32) if output.dtype == "bfloat16" else output
            for number, output in enumerate(outputs)
        }

    fed = np.float32 if half == "bfloat16" else np.float16  # which onnxruntime's sessions take and return
    results = traced(function, x.astype(fed), y.astype(fed))
    numpy = array_api_compat.array_namespace(NUMBERS)
    with np.errstate(all="ignore"):
        expected = row(numpy, *(array.astype(np.float32) for array in (x, y)[:count]))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for number, (result, exact, kind) in enumerate(zip(results, expected, kinds, strict=True)):
        if name == "sum" and number >= 4:  # in a dtype that is asked for
            continue
        rounded = np.asarray(exact).astype(HALVES[half]) if exact.dtype.kind == "f" else exact
        assert kind == ("bool" if name in COMPARED else half)
        bound = 2 * float(ml_dtypes.finfo(HALVES[half]).eps) if name in CLOSE else 0.0
        result, rounded = (x.astype(np.float32) for x in (result, rounded))
        np.testing.assert_allclose(result, rounded, rtol=bound, atol=0, err_msg=name)


@pytest.mark.parametrize(
    ("dtypes", "joint"),
    [
        (("float16", "float32"), "float32"),
        (("bfloat16", "float32"), "float32"),
        (("bfloat16", "float64"), "float64"),
        (("float16", "float16"), "float16"),
    ],
)
def test_half_precision_promotes_as_in_numpy(dtypes: tuple[str, str], joint: str) -> None:
    promoted = []

    def function(x: Any) -> Any:
        xp = x.__array_namespace__()
        one, other = (xp.astype(x, dtype) for dtype in dtypes)
        promoted.append(((one + other).dtype, xp.result_type(one, other, 1.5), (one * 2).dtype))
        return xp.astype(one + other, xp.float32)

    traced(function, NUMBERS)
    assert promoted == [(joint, joint, dtypes[0])]
    assert np.result_type(*(HALVES.get(dtype, dtype) for dtype in dtypes)).name == joint


def test_bfloat16_stays_itself_where_cuda_computes() -> None:
    """The CPU has no kernels for it, so that there it is computed in float32."""
    spec = TensorSpec("bfloat16", (4, 4))
    nodes = {
        provider: [
            node.op_type
            for node in to_onnx(lambda x: x @ x + 1, spec, runtime=f"onnxruntime>=1.28;{provider}").graph.node
        ]
        for provider in ("cpu", "cuda")
    }
    assert nodes["cuda"] == ["MatMul", "Add"]
    assert [op for op in nodes["cpu"] if op != "Cast"] == ["MatMul", "Add"]
    assert nodes["cpu"][-1] == "Cast"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_erf(dtype: str) -> None:
    """NaN stays one; of float64 there is no kernel, and no wider dtype."""
    numbers = NUMBERS.astype(dtype)
    if dtype == "float64":
        with pytest.raises(TypeError, match=r"^to_onnx: onnxruntime must have a kernel for Erf in this dtype"):
            traced(lambda x: x.__array_namespace__().erf(x), numbers)
        return
    expected = np.vectorize(math.erf)(numbers)
    for runtime in ("onnxruntime>=1.23;cpu", "onnxruntime>=1.28;cpu"):
        (result,) = traced(lambda x: x.__array_namespace__().erf(x), numbers, runtime=runtime)
        np.testing.assert_allclose(result, expected, rtol=0, atol=3e-7)
    spec, runtime = TensorSpec(dtype, (3, 4)), "onnxruntime>=1.27;cpu"
    old = to_onnx(lambda x: x.__array_namespace__().erf(x), spec, runtime=runtime)
    assert [node.op_type for node in old.graph.node] == ["Erf", "Equal", "Where"]


def test_is_masked() -> None:
    (result,) = traced(lambda x: x.__array_namespace__().is_masked(x), NUMBERS)
    np.testing.assert_array_equal(result, np.isneginf(NUMBERS))


THIRD = np.full((1, 1), 1 / 3)
SCALED: dict[str, Callable[[Any, Any], Any]] = {
    "before": lambda x, y: (x * 0.1) @ y,
    "right": lambda x, y: x @ (y / 3.0),
    "transposed": lambda x, y: x @ (y * 0.1).mT,
    "behind": lambda x, y: (x @ y) * 0.1,
    "in front": lambda x, y: 0.1 * (x @ y),
    "over": lambda x, y: (x @ y) / 3.0,
    "array": lambda x, y: THIRD * (x @ y),
    "transposed, behind": lambda x, y: (x @ y).mT * 0.1,
}


@pytest.mark.parametrize("name", SCALED)
def test_numbers_beside_a_product_of_float64_stay_float64(name: str) -> None:
    """onnxruntime folds such a number into the MatMul as a float32, before it and behind it."""
    x, y = np.random.default_rng(3).standard_normal((2, 4, 4))
    (result,) = traced(SCALED[name], x, y)
    np.testing.assert_allclose(result, SCALED[name](x, y), rtol=0, atol=1e-14)


def test_scalars_of_numpy_are_arrays_without_axes() -> None:
    """But a float64, which Python takes for a float."""

    def function(x: Any, i: Any) -> dict[str, Any]:
        return {
            "wider": i + np.int64(2**40),
            "as wide": np.float32(0.5) * x,
            "float": x / np.sqrt(4.0),
            "bool": (i > 0) & np.bool_(True),
        }

    arrays = NUMBERS, np.asarray([1, -1], np.int32)
    for result, expected in zip(traced(function, *arrays), function(*arrays).values(), strict=True):
        assert result.dtype == expected.dtype or expected.dtype == np.float64
        np.testing.assert_array_equal(result, expected)


def test_a_length_takes_the_dtype_of_the_array_beside_it() -> None:
    def function(x: Any) -> dict[str, Any]:
        xp = array_api_compat.array_namespace(x)
        return {"times": x * x.shape[0], "chosen": xp.where(x > 0, x.shape[0], 0), "divided": x / x.shape[0]}

    model = to_onnx(function, TensorSpec("float32", ("N", 4)))
    for result, expected in zip(run(model, NUMBERS), function(NUMBERS).values(), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)


def test_two_scalars_get_the_default_dtypes() -> None:
    def function(x: Any) -> dict[str, Any]:
        xp = x.__array_namespace__()
        pairs = {"int": (1, 0), "float": (0.5, 1), "bool": (True, False), "mixed": (2**53 + 1, True)}
        return {name: xp.where(x > 0, *pair) for name, pair in pairs.items()}

    outputs = traced(function, NUMBERS)
    assert [result.dtype.name for result in outputs] == ["int64", "float32", "bool", "int64"]
    np.testing.assert_array_equal(outputs[3], np.where(NUMBERS > 0, 2**53 + 1, 1))


def test_an_array_keeps_its_dtype() -> None:
    """`asarray` of one, and what stands beside values."""
    weight = np.arange(4.0)

    def function(x: Any) -> Any:
        xp = x.__array_namespace__()
        assert xp.asarray(weight).dtype == np.float64
        assert xp.asarray([1.5]).dtype == np.float32
        assert xp.asarray(weight, dtype=xp.float32).dtype == np.float32
        assert xp.astype(weight, xp.bfloat16).dtype == ml_dtypes.bfloat16
        assert xp.sum(weight, dtype=xp.float32).dtype == np.float32
        return x + xp.asarray(weight)

    (result,) = traced(function, NUMBERS)
    assert result.dtype == np.float64


def test_what_the_namespace_says_of_itself() -> None:
    def function(x: Any) -> Any:
        info = x.__array_namespace__().__array_namespace_info__()
        assert info.default_dtypes() == {"real floating": "float32", "integral": "int64", "indexing": "int64"}
        assert [*info.dtypes(kind="unsigned integer")] == ["uint8", "uint16", "uint32", "uint64"]
        assert {*info.dtypes(kind=("bool", "real floating"))} == {"bool", "float32", "float64"}
        assert len(info.dtypes()) == 11
        return -x

    traced(function, NUMBERS)


def onto_zeros(x: Any) -> Any:
    total = x.__array_namespace__().zeros(x.shape, dtype=x.dtype)
    for factor in (1.5, 2.0):
        total += x * factor
    total -= 1
    return total


def onto_an_array(x: Any) -> Any:
    total = np.ones(4, np.float32)
    total *= x[0, :]
    return total


def scaled_by_numbers(x: Any) -> Any:
    """The sum of an array is a scalar in NumPy, not an array without axes."""
    xp = x.__array_namespace__()
    weight = xp.asarray(NUMBERS[0])
    return x / xp.sqrt(xp.sum(weight * weight)) + xp.exp(xp.mean(weight))


def chosen_of_numbers(x: Any) -> Any:
    xp = x.__array_namespace__()
    return xp.where(x > 0, np.float32(0.5), np.float32(-2)) + xp.clip(x, np.float32(-1), np.float32(1))


def small_integers(x: Any) -> Any:
    xp = x.__array_namespace__()
    return xp.astype(x, xp.int8) + xp.asarray(np.int8(3))


def array_on_the_left(x: Any) -> Any:
    return np.float32(2) * (NUMBERS - x) / (np.ones((1, 4), np.float32) + abs(x))


@pytest.mark.parametrize(
    "layer",
    [onto_zeros, onto_an_array, scaled_by_numbers, chosen_of_numbers, small_integers, array_on_the_left],
)
def test_numbers_and_arrays_of_numpy(layer: Callable[..., Any]) -> None:
    """What a layer makes of NumPy's own alone, and adds values to in place."""
    x = np.asarray([[0.5, -3.0, 2.0, 1.0], [4.0, -0.25, 0.0, 7.0], [1.5, 2.5, -1.0, 3.0]], np.float32)
    before = NUMBERS.copy()
    (result,) = traced(layer, x)
    expected = layer(x.copy())
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_array_equal(NUMBERS, before)


@pytest.mark.parametrize(
    ("layer", "error"),
    [
        (lambda x: operator.iadd(x, NUMBERS.astype(np.float64)), TypeError),
        (lambda x: operator.iadd(x[0, :], x), ValueError),
        (lambda x: operator.iadd(np.ones(4, np.float32), x), ValueError),
        (lambda x: operator.imul(np.ones((3, 4), np.float16), x), TypeError),
        (lambda x: operator.iadd(x > 0, x), TypeError),
    ],
)
def test_in_place_keeps_dtype_and_shape(layer: Callable[..., Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="must"):
        to_onnx(layer, TensorSpec("float32", (3, 4)))


def test_other_functions_of_numpy_are_refused() -> None:
    for layer in (
        lambda x: np.exp(x),  # a ufunc itself has no signature before NumPy 2.4
        lambda x: np.add.reduce(x),
        lambda x: np.add(x, x, where=NUMBERS > 0),
        lambda x: np.divmod(x, 2),
    ):
        with pytest.raises(TypeError, match=r"a value of a graph must not go to `numpy\.\w+`"):
            to_onnx(layer, TensorSpec("float32", (3, 4)))


@pytest.mark.parametrize("module", [pytest.param(m, marks=pytest.mark.needs(m)) for m in ("torch", "jax")])
def test_a_weight_in_bfloat16_of_any_library(module: str) -> None:
    """DLPack of NumPy does not know the dtype."""
    library = __import__("jax.numpy" if module == "jax" else module, fromlist=["ones"])
    weight = library.full((2, 2), 1.5, dtype=library.bfloat16)
    model = to_onnx(lambda x: x @ weight, TensorSpec("bfloat16", ("L", 2)))
    (numbers,) = (numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    assert numbers.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(numbers.astype(np.float32), np.full((2, 2), 1.5, np.float32))
