"""The rows of `traced_table` on arrays: what array-api-strict makes of them, and a graph that has to agree."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import array_api_strict as strict
import numpy as np
import onnx
from traced_table import COUNTED, COUNTS, SIGN_OF_ZERO, ULPS, Row, refused_here

from sdpa_xp_export import TensorSpec, to_onnx
from sdpa_xp_export._graph.graph import GraphValue

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


def model_of(rows: Mapping[str, Row], *given: Any, **export: Any) -> tuple[onnx.ModelProto, dict[str, int]]:
    """All rows in one graph, whose inputs are x0 and x1, and how many results each of them has."""
    counts: dict[str, int] = {}

    def function(**values: Any) -> dict[str, Any]:
        held = [values.get(f"x{at}", each) for at, each in enumerate(given)]
        first = next(iter(values.values()))
        made = {name: several(row(first.__array_namespace__(), *held)) for name, row in rows.items()}
        counts.update({name: len(found) for name, found in made.items()})
        return {
            f"{name} {at}": each if isinstance(each, GraphValue) else first.graph.operand(each)
            for name, found in made.items()
            for at, each in enumerate(found)
        }

    specs = {name: TensorSpec(x.dtype.name, x.shape) for name, x in feeds_of(*given).items()}
    model = to_onnx(function, **specs, **export)
    assert isinstance(model, onnx.ModelProto)
    return model, counts


def feeds_of(*given: Any) -> dict[str, np.ndarray]:
    """The arrays among the arguments, as inputs of the graph."""
    return {f"x{at}": each for at, each in enumerate(given) if isinstance(each, np.ndarray)}


def expected_of(rows: Mapping[str, Row], *given: Any) -> dict[str, tuple[np.ndarray, ...]]:
    """The rows that are computed, and what they give."""
    found = {name: strictly(row, *given) for name, row in rows.items() if not refused_here(name, given)}
    return {name: each for name, each in found.items() if isinstance(each, tuple)}


def takes_conditions(name: str, given: tuple[Any, ...]) -> bool:
    """Whether a call is computed here that array-api-strict refuses."""
    return name in COUNTS and given[0].dtype == bool


def assert_all_same(
    expected: Mapping[str, tuple[np.ndarray, ...]], counts: Mapping[str, int], outputs: Mapping[str, np.ndarray]
) -> None:
    """The outputs of the graph of these rows are what the rows give."""
    assert {name: len(found) for name, found in expected.items()} == counts
    for name, found in expected.items():
        for at, each in enumerate(found):
            assert_same(name, outputs[f"{name} {at}"], each)


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
