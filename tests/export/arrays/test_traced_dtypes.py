"""Every function of a traced namespace on every dtype is array-api-strict's: dtype, shape and numbers.

What the standard leaves undefined, and array-api-strict refuses, is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest
import traced_calls
import traced_table as table
from graphs import run
from internals import GraphValue, graph_namespace
from traced_calls import DTYPES, INTEGERS, REFUSED, counts, expected_of, feeds_of, model_of, numbers, takes_more
from traced_table import BINARY, COUNTED, IN_PLACE, JOINED, NO_FUNCTIONS, OPERATORS, UNARY, Row

from sdpa_xp_export import TensorSpec, to_onnx

SCALARS = (True, 0, 1, 3, -2, 200, 2**40, 2**63 + 1, 0.25, -2.5, float("inf"), float("nan"))

OTHERS = {"__array_namespace__", "__bool__", "__annotations__", "__module__", "__slots__"}
OTHERS |= {"__complex__", "__float__", "__index__", "__int__"}  # a value refuses to be a number


def check(rows: Mapping[str, Row], *arguments: Any) -> None:
    """Each row gives what array-api-strict gives, or is refused where that refuses."""
    expected = expected_of(rows, *arguments)
    for name in rows.keys() - expected.keys():
        if not takes_more(name, arguments):
            with pytest.raises(REFUSED, match="must"):
                model_of({name: rows[name]}, *arguments)
    if expected:
        model, counted = model_of({name: rows[name] for name in expected}, *arguments)
        traced_calls.assert_all_same(expected, counted, run(model, feeds_of(*arguments)))


def test_each_function_has_a_row() -> None:
    offered = {
        name for name in graph_namespace.__all__ if callable(getattr(graph_namespace, name)) and name[0] != "_"
    }
    assert (
        offered
        == {name for name in {*BINARY, *JOINED, *UNARY} if name[0] != "_"} - NO_FUNCTIONS
        | table.BESIDE_THE_STANDARD
    )
    files = [file for file in vars(graph_namespace).values() if hasattr(file, "__all__")]
    computed = {name for file in files for name, x in vars(file).items() if hasattr(x, "__wrapped__")}
    assert "permute_dims" in computed  # by the decorator of such functions
    assert computed <= {*graph_namespace.__all__}


def test_each_operator_has_a_row() -> None:
    """Those of the reflected operators are the same, by a scalar or an array in front."""
    array = strict.asarray([1])
    operators = {n for n in vars(GraphValue) if n[:2] == "__" and hasattr(array, n)} - {*dir(object)}
    operators |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
    reflected = {f"__r{name[2:]}" for name in operators}
    rows = {name for name in {*OPERATORS, *IN_PLACE, *UNARY, *JOINED} if name[:2] == "__"}
    assert operators - reflected - OTHERS == rows


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("one", "other"), [*itertools.product(DTYPES, DTYPES)])
def test_of_two_arrays(one: str, other: str) -> None:
    for rows, arguments in traced_calls.of_two_arrays(BINARY | OPERATORS | IN_PLACE | JOINED, one, other):
        check(rows, *arguments)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scalar", SCALARS)
def test_of_an_array_and_a_scalar(dtype: str, scalar: Any) -> None:
    rows = BINARY | OPERATORS | {name: row for name, row in IN_PLACE.items() if name != "__imatmul__"}
    check(rows, numbers(dtype), scalar)
    check({name: row for name, row in rows.items() if name not in COUNTED}, scalar, numbers(dtype))
    counted = counts(dtype) if dtype in INTEGERS else numbers(dtype)
    check({name: row for name, row in rows.items() if name in COUNTED}, scalar, counted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_of_one_array(dtype: str, seed: int) -> None:
    check(UNARY, numbers(dtype, seed))


def test_a_python_integer_may_be_each_number_of_the_dtype() -> None:
    for dtype in INTEGERS:
        limits, x = np.iinfo(dtype), TensorSpec(dtype, ("N",))
        for number in (int(limits.min), int(limits.max)):
            to_onnx(lambda x, number=number: x == number, x)
        for number in (int(limits.min) - 1, int(limits.max) + 1):
            with pytest.raises(OverflowError, match="within the range"):
                to_onnx(lambda x, number=number: x == number, x)
