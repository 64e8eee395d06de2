"""What the table of dtypes has no row for: half precision, scalars, lengths, and products of float64."""

from __future__ import annotations

import math
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
COMPARED = ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "__eq__", "__ne__"]
COMPARED += ["__lt__", "__le__", "__gt__", "__ge__"]
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


def test_erf() -> None:
    """NaN stays one."""
    numbers = NUMBERS.astype("float32")
    expected = np.vectorize(math.erf)(numbers)
    for runtime in ("onnxruntime>=1.23;cpu", "onnxruntime>=1.28;cpu"):
        (result,) = traced(lambda x: x.__array_namespace__().erf(x), numbers, runtime=runtime)
        np.testing.assert_allclose(result, expected, rtol=0, atol=3e-7)
    spec, runtime = TensorSpec("float32", (3, 4)), "onnxruntime>=1.26;cpu"
    old = to_onnx(lambda x: x.__array_namespace__().erf(x), spec, runtime=runtime)
    assert [node.op_type for node in old.graph.node] == ["Erf", "Equal", "Where"]
    new = to_onnx(lambda x: x.__array_namespace__().erf(x), spec, runtime="onnxruntime>=1.27;cpu")
    assert [node.op_type for node in new.graph.node] == ["Erf"]


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


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: (x * 3.0) * (1 + 1e-9) - 3.0,
        lambda x: (x * 3.0) / (1 + 1e-9) - 3.0,
        lambda x: (x * 0.0 + 1e-300) * 1e300,
        lambda x: (x * 0.0 - 1e-300) * 1e300,
        lambda x: (1e-300 + x * 0.0) * 1e300,
        lambda x: (x * 0.0 + np.full((1,), 1e-300)) * 1e300,
    ],
)
def test_numbers_that_are_0_or_1_as_float32_stay_float64(layer: Callable[[Any], Any]) -> None:
    """onnxruntime leaves out a sum with such a number, and a product, if another node reads it."""
    x = np.linspace(0.5, 2.0, 7)
    (result,) = traced(layer, x)
    np.testing.assert_allclose(result, layer(x), rtol=1e-15, atol=0)


def test_special_numbers() -> None:
    """The edges of formulas, which are NumPy's to a few units in the last place."""
    edges = [0.0, 5e-324, 1e-310, 1e-300, 1e-17, 1e-8, 0.5, 1.0, 1.5, 20.0, 709.0, 710.0, 1e6, 1e15, 1e300]
    x = np.asarray(
        [*edges, np.inf, np.nan, *(1 - np.asarray([1e-16, 1e-8])), math.pi / 2, math.pi, 8.0, 1000.0]
    )
    x = np.concatenate([x, -x[~np.isnan(x)]])  # ONNX cannot read the sign of a NaN
    names = (
        "acos acosh asin asinh atan atanh cosh sinh tan expm1 log1p log2 log10 trunc round ceil sign signbit"
    )
    pairs = "atan2 copysign hypot logaddexp nextafter floor_divide remainder"
    for dtype in (np.float64, np.float32):

        def function(x: Any) -> dict[str, Any]:
            xp = array_api_compat.array_namespace(x)
            one = {name: getattr(xp, name)(x) for name in names.split()}
            return one | {name: getattr(xp, name)(x[:, None], x) for name in pairs.split()}

        with np.errstate(all="ignore"):
            numbers = x.astype(dtype)
            expected = function(numbers)
        for (name, exact), result in zip(expected.items(), traced(function, numbers), strict=True):
            assert result.dtype == exact.dtype, name
            unit = 16 * np.finfo(dtype).eps if name not in EXACT else 0.0
            np.testing.assert_allclose(result, exact, rtol=unit, atol=np.finfo(dtype).tiny * unit, err_msg=name)
            # The number above the smallest negative one is -0, which onnxruntime's Where makes 0.
            has_sign = ~np.isnan(exact) & ((exact != 0) | (name != "nextafter"))
            signs = (np.signbit(y[has_sign]) for y in (result, exact))
            np.testing.assert_array_equal(*signs, err_msg=name)


EXACT = {"trunc", "round", "ceil", "sign", "copysign", "nextafter", "floor_divide", "remainder"}


def test_attributes_of_a_value() -> None:
    def function(x: Any) -> Any:
        assert (len(x), x.size, x.to_device(x.device).shape) == (3, 12, (3, 4))
        return x.T

    np.testing.assert_array_equal(traced(function, NUMBERS)[0], NUMBERS.T)


def test_isin_inverted() -> None:
    (result,) = traced(lambda x: x.__array_namespace__().isin(x, x[:1, :], invert=True), NUMBERS)
    np.testing.assert_array_equal(result, np.isin(NUMBERS, NUMBERS[:1], invert=True))


INDICES: dict[str, Callable[[Any, Any], Any]] = {
    "array": lambda x, i: x[i],
    "after a slice": lambda x, i: x[:, 1:, i],
    "two arrays": lambda x, i: x[i, i[:, None] - 1],
    "apart": lambda x, i: x[i, :, i],
    "apart by None": lambda x, i: x[i, None, i],
    "beside a number": lambda x, i: x[..., 1, i],
    "after a rest": lambda x, i: x[..., i],
    "of no axes": lambda x, i: x[i[0], ..., None],
    "mask": lambda x, i: x[x > 0],
    "mask of rows": lambda x, i: x[x[:, 0, 0] > 0],
    "mask of columns": lambda x, i: x[:, x[0, :, 0] > 0, 1:],
    "mask and array": lambda x, i: x[x[:, :, 0] > 0, i[0]],
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_that_are_arrays(name: str) -> None:
    rng = np.random.default_rng(5)
    arrays = rng.standard_normal((3, 4, 5)).astype(np.float32), np.asarray([2, -1, 0])
    (result,) = traced(INDICES[name], *arrays)
    np.testing.assert_array_equal(result, INDICES[name](*arrays))


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


@pytest.mark.parametrize("module", [pytest.param(m, marks=pytest.mark.needs(m)) for m in ("torch", "jax")])
def test_a_weight_in_bfloat16_of_any_library(module: str) -> None:
    """DLPack of NumPy does not know the dtype."""
    library = __import__("jax.numpy" if module == "jax" else module, fromlist=["ones"])
    weight = library.full((2, 2), 1.5, dtype=library.bfloat16)
    model = to_onnx(lambda x: x @ weight, TensorSpec("bfloat16", ("L", 2)))
    (numbers,) = (numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    assert numbers.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(numbers.astype(np.float32), np.full((2, 2), 1.5, np.float32))
