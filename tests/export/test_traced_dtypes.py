"""Every function of a traced namespace on every dtype is array-api-strict's: dtype, shape and numbers.

What the standard leaves undefined, and array-api-strict refuses, is refused.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import array_api_strict as strict
import numpy as np
import onnxruntime
import pytest
from traced_table import (
    BESIDE_THE_STANDARD,
    BINARY,
    COUNTED,
    COUNTS,
    JOINED,
    OPERATORS,
    SIGN_OF_ZERO,
    ULPS,
    UNARY,
    Row,
    refused_here,
)

from sdpa_xp_export import TensorSpec, namespace, to_onnx
from sdpa_xp_export.array import Value

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float32", "float64")
REFUSED = (TypeError, ValueError, OverflowError, ZeroDivisionError, IndexError)
SCALARS = (True, 0, 1, 3, -2, 200, 2**40, 2**63 + 1, 0.25, -2.5, float("inf"), float("nan"))

OTHERS = {"__array_namespace__", "__bool__", "__annotations__", "__module__", "__slots__"}


def counts(dtype: str) -> np.ndarray:
    """(3, 4): numbers from 0 to beyond the bits of a dtype, for powers and shifts."""
    return np.asarray([0, 1, 2, 3, 7, 8, 15, 31, 32, 63, 64, 100], dtype).reshape(3, 4)


def numbers(dtype: str, seed: int = 0) -> np.ndarray:
    """(3, 4): the ends of the dtype, what no float holds, and small numbers; or NaN and infinities."""
    if dtype == "bool":
        return np.random.default_rng(seed).random((3, 4)) < 0.5
    if dtype in INTEGERS:
        ends = np.iinfo(dtype)
        small = [0, 1, 2, 3, 7, 5]
        signed = [-1, -7, -3, ends.min + 1] if ends.min else [11, 12, 13, 14]
        large = [2**53 + 1, 2**32 - 6] if ends.bits == 64 else [ends.max - 5, ends.max // 2]
        found = np.asarray([*small[seed % 2 :][:5], *signed, *large, ends.max if seed % 2 else ends.min], dtype)
    else:
        found = np.asarray([0.0, -0.0, 1.0, -1.5, 2.5, -7.0, 0.1, 3.0, 1e-3, np.inf, -np.inf, np.nan], dtype)
    return np.random.default_rng(seed).permutation(found).reshape(3, 4)


def strictly(row: Row, *given: Any) -> tuple[np.ndarray, ...] | type[Exception]:
    """What array-api-strict makes of the arguments, or what it raises."""
    held = [strict.asarray(each) if isinstance(each, np.ndarray) else each for each in given]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if len(given) == 2:  # it lets kinds mix in a few functions, which the standard leaves undefined
                strict.result_type(*held)
            return tuple(np.asarray(each) for each in several(row(strict, *held)))
        except REFUSED as error:
            return type(error)


def several(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def traced(rows: Mapping[str, Row], *given: Any) -> dict[str, list[np.ndarray]]:
    """What onnxruntime makes of each row, all of them in one graph."""
    arrays = {f"x{at}": each for at, each in enumerate(given) if isinstance(each, np.ndarray)}
    counts: dict[str, int] = {}

    def function(**values: Any) -> dict[str, Any]:
        held = [values.get(f"x{at}", each) for at, each in enumerate(given)]
        xp = next(iter(values.values())).__array_namespace__()
        made = {name: several(row(xp, *held)) for name, row in rows.items()}
        counts.update({name: len(found) for name, found in made.items()})
        return {
            f"{name} {at}": each if isinstance(each, Value) else next(iter(values.values())).graph.operand(each)
            for name, found in made.items()
            for at, each in enumerate(found)
        }

    model = to_onnx(function, **{name: TensorSpec(x.dtype.name, x.shape) for name, x in arrays.items()})
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found = iter(session.run(None, arrays))
    return {name: [next(found) for _ in range(count)] for name, count in counts.items()}


def assert_same(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Of one dtype, one shape and the same numbers, with their signs, up to the units of `ULPS`."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    if found.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected, err_msg=name)
        return
    finite = expected[np.isfinite(expected)]
    unit = np.finfo(expected.dtype).eps * np.abs(finite).max(initial=0.0) if finite.size else 0.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=ULPS.get(name, 0) * unit, err_msg=name)
    if name not in ULPS and name not in SIGN_OF_ZERO:
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected), err_msg=name)


def check(rows: Mapping[str, Row], *given: Any) -> None:
    """Each row gives what array-api-strict gives, or is refused where that refuses."""
    expected = {name: strictly(row, *given) for name, row in rows.items() if not refused_here(name, given)}
    computed = {name: rows[name] for name, found in expected.items() if isinstance(found, tuple)}
    for name, row in rows.items():
        if name not in computed and not (name in COUNTS and given[0].dtype == bool):
            with pytest.raises(REFUSED, match="must"):
                traced({name: row}, *given)
    if not computed:
        return
    for name, results in traced(computed, *given).items():
        wanted = expected[name]
        assert isinstance(wanted, tuple)
        for found, each in zip(results, wanted, strict=True):
            assert_same(name, found, each)


def test_each_function_has_a_row() -> None:
    offered = {name for name in namespace.__all__ if callable(getattr(namespace, name)) and name[0] != "_"}
    assert (
        offered
        == {name for name in {*BINARY, *JOINED, *UNARY} if name[0] != "_"} - {"mT"} | BESIDE_THE_STANDARD
    )
    made = {name for name, x in vars(namespace).items() if getattr(x, "__module__", "").endswith("namespace")}
    assert made <= {*namespace.__all__}


def test_each_operator_has_a_row() -> None:
    """Those of the reflected operators are the same, by a scalar or an array in front."""
    array = strict.asarray([1])
    operators = {name for name in vars(Value) if name[:2] == "__" and hasattr(array, name)} - {*dir(object)}
    operators |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
    reflected = {f"__r{name[2:]}" for name in operators}
    rows = {name for name in {*OPERATORS, *UNARY, *JOINED} if name[:2] == "__"}
    assert operators - reflected - OTHERS == rows


@pytest.mark.parametrize(("one", "other"), [*itertools.product(DTYPES, DTYPES)])
def test_of_two_arrays(one: str, other: str) -> None:
    rows = BINARY | OPERATORS | JOINED
    check(without(rows, COUNTED), numbers(one, 1), numbers(other, 2))
    check(only(rows, COUNTED), numbers(one, 1), counts(other) if other in INTEGERS else numbers(other, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scalar", SCALARS)
def test_of_an_array_and_a_scalar(dtype: str, scalar: Any) -> None:
    rows = BINARY | OPERATORS
    check(rows, numbers(dtype), scalar)
    check(without(rows, COUNTED), scalar, numbers(dtype))
    check(only(rows, COUNTED), scalar, counts(dtype) if dtype in INTEGERS else numbers(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_of_one_array(dtype: str, seed: int) -> None:
    check(UNARY, numbers(dtype, seed))


def only(rows: Mapping[str, Row], names: set[str]) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if name in names}


def without(rows: Mapping[str, Row], names: set[str]) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if name not in names}
