"""The rows of `traced_table` on arrays: what array-api-strict makes of them, and a graph that has to agree."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import array_api_strict as strict
import numpy as np
import onnx
from internals import GraphValue
from traced_table import COUNTED, SIGN_OF_NAN, SIGN_OF_ZERO, TAKES_MORE, ULPS, Row, refused_here

from sdpa_xp_export import TensorSpec, to_onnx

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float32", "float64")
REFUSED = (TypeError, ValueError, OverflowError, ZeroDivisionError, IndexError)

Arrays = tuple[np.ndarray, ...]


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
        values = np.asarray(
            [*small[seed % 2 :][:5], *signed, *large, ends.max if seed % 2 else ends.min], dtype
        )
    else:
        values = np.asarray([0.0, -0.0, 1.0, -1.5, 2.5, -7.0, 0.1, 3.0, 1e-3, np.inf, -np.inf, np.nan], dtype)
    return np.random.default_rng(seed).permutation(values).reshape(3, 4)


def strictly(row: Row, *arguments: Any) -> tuple[np.ndarray, ...] | type[Exception]:
    """What array-api-strict makes of the arguments, or what it raises."""
    arrays = [strict.asarray(x) if isinstance(x, np.ndarray) else x for x in arguments]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if len(arguments) == 2:  # it lets kinds mix in a few functions, which the standard leaves undefined
                strict.result_type(*arrays)
            return tuple(np.asarray(result) for result in several(row(strict, *arrays)))
        except REFUSED as error:
            return type(error)


def several(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def model_of(rows: Mapping[str, Row], *arguments: Any, **export: Any) -> tuple[onnx.ModelProto, dict[str, int]]:
    """All rows in one graph, whose inputs are x0 and x1, and how many results each of them has."""
    counts: dict[str, int] = {}

    def function(**values: Any) -> dict[str, Any]:
        operands = [values.get(f"x{number}", x) for number, x in enumerate(arguments)]
        first = next(iter(values.values()))
        results_of = {name: several(row(first.__array_namespace__(), *operands)) for name, row in rows.items()}
        counts.update({name: len(results) for name, results in results_of.items()})
        return {
            f"{name} {number}": x if isinstance(x, GraphValue) else first.graph.operand(x)
            for name, results in results_of.items()
            for number, x in enumerate(results)
        }

    specs = {name: TensorSpec(x.dtype.name, x.shape) for name, x in feeds_of(*arguments).items()}
    model = to_onnx(function, **specs, **export)
    assert isinstance(model, onnx.ModelProto)
    return model, counts


def feeds_of(*arguments: Any) -> dict[str, np.ndarray]:
    """The arrays among the arguments, as inputs of the graph."""
    return {
        f"x{number}": argument for number, argument in enumerate(arguments) if isinstance(argument, np.ndarray)
    }


def expected_of(rows: Mapping[str, Row], *arguments: Any) -> dict[str, tuple[np.ndarray, ...]]:
    """The rows that are computed, and what they give."""
    results = {
        name: strictly(row, *arguments) for name, row in rows.items() if not refused_here(name, arguments)
    }
    return {name: result for name, result in results.items() if isinstance(result, tuple)}


def takes_more(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a call is computed here that array-api-strict refuses."""
    return getattr(arguments[0], "dtype", None) in TAKES_MORE.get(name, ())


def assert_all_same(
    expected: Mapping[str, tuple[np.ndarray, ...]], counts: Mapping[str, int], outputs: Mapping[str, np.ndarray]
) -> None:
    """The outputs of the graph of these rows are what the rows give."""
    assert {name: len(results) for name, results in expected.items()} == counts
    for name, results in expected.items():
        for number, result in enumerate(results):
            assert_same(name, outputs[f"{name} {number}"], result)


def of_two_arrays(rows: Mapping[str, Row], one: str, other: str) -> list[tuple[dict[str, Row], Arrays]]:
    """The rows with the arrays that suit them: powers and shifts are by counts."""
    counted = counts(other) if other in INTEGERS else numbers(other, 2)
    return [
        (
            {name: row for name, row in rows.items() if name not in COUNTED},
            (numbers(one, 1), numbers(other, 2)),
        ),
        ({name: row for name, row in rows.items() if name in COUNTED}, (numbers(one, 1), counted)),
    ]


def assert_same(name: str, result: np.ndarray, expected: np.ndarray) -> None:
    """Of one dtype, one shape and the same numbers, with their signs, up to the units of `ULPS`."""
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), name
    if result.dtype.kind != "f":
        np.testing.assert_array_equal(result, expected, err_msg=name)
        return
    finite = expected[np.isfinite(expected)]
    unit = np.finfo(expected.dtype).eps * np.abs(finite).max(initial=0.0) if finite.size else 0.0
    np.testing.assert_allclose(result, expected, rtol=0, atol=ULPS.get(name, 0) * unit, err_msg=name)
    if name not in ULPS and name not in SIGN_OF_ZERO:
        has_sign = ~np.isnan(expected) if name in SIGN_OF_NAN else np.full(expected.shape, True)
        np.testing.assert_array_equal(
            np.signbit(result) & has_sign, np.signbit(expected) & has_sign, err_msg=name
        )
