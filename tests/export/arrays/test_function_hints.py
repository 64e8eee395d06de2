"""The hint for a function or a method of another library names what the namespace of a value has."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from graphs import run
from internals import EXPRESSION_TABLE, EXPRESSIONS, function_hint, graph_namespace

from sdpa_xp_export import TensorSpec, to_onnx

X = TensorSpec("float32", (1, 4, 4))
OPERANDS: dict[str, Any] = {
    "axes": (1, 0, 2),
    "destination": 2,
    "fill_value": 1.0,
    "length": 4,
    "max": 1.0,
    "min": 0.0,
    "num": 4,
    "repeats": 2,
    "repetitions": (2, 1),
    "shift": 1,
    "start": 0.0,
    "stop": 1.0,
    "shape": (4, 1, 4, 4),
    "source": 0,
}
KINDS = {"bitwise": "int32", "logical": "bool"}
"""The dtype of the operands, by the first word of a function."""
PARTS: dict[str, Any] = {"meshgrid": (0, 0, ...), "searchsorted": (0, 0, ...), "tensordot": (0, ...)}
"""The part of x that a function takes, which needs fewer axes."""
NAMES = {name for name in (*graph_namespace.__all__, *EXPRESSIONS) if not name.startswith("_")}


def suggestion(name: str) -> str:
    """The expression of a hint."""
    pattern = r"^Write (.+?)(?:, with xp = .*)?\.$|__array_namespace__\(\), (.+)\.$"
    match = re.search(pattern, function_hint(name, graph_namespace))
    assert match, name
    return str(match[1] or match[2])


@pytest.mark.parametrize("name", sorted(NAMES))
def test_what_a_hint_says_can_be_computed(name: str) -> None:
    expression = suggestion(name)
    assert set(re.findall(r"xp\.(\w+)", expression)) <= set(graph_namespace.__all__)
    words = re.search(r"xp\.([a-z]+)_", expression)
    dtype = KINDS.get(words[1] if words else "", "float32")

    def layer(x: Any) -> Any:
        xp = x.__array_namespace__()
        value, shape = xp.astype(x, dtype), (4, 4) if "reshape" in expression else OPERANDS["shape"]
        function = expression.removeprefix("xp.").partition("(")[0]
        value = value[PARTS.get(function, ...)]
        indices = xp.astype(x if function == "take_along_axis" else x[0, 0, :1], "int64")
        arrays = {"x": value, "y": value, "condition": x > 0, "indices": indices}
        dtypes = {"dtype": "int32" if function == "iinfo" else "float64"}
        eval(expression, {"xp": xp, **OPERANDS, **arrays, **dtypes, "shape": shape})
        return x

    to_onnx(layer, X)


def test_what_a_hint_says_is_the_function() -> None:
    numbers = np.random.default_rng(0).standard_normal((1, 4, 4)).astype(np.float32)
    erf = np.asarray([math.erf(number / math.sqrt(2)) for number in numbers.ravel()]).reshape(numbers.shape)
    powers = np.exp(numbers)
    expected = {
        "gelu": numbers * (1 + erf) / 2,
        "silu": numbers / (1 + np.exp(-numbers)),
        "sigmoid": 1 / (1 + np.exp(-numbers)),
        "softmax": powers / powers.sum(axis=-1, keepdims=True),
    }
    for name, output in expected.items():

        def layer(x: Any, expression: str = suggestion(name)) -> Any:
            return eval(expression, {"xp": x.__array_namespace__(), "x": x})

        model = to_onnx(layer, X)
        np.testing.assert_allclose(run(model, {"x": numbers})["output"], output, rtol=1e-5, atol=1e-6)


def test_each_name_has_one_place() -> None:
    """A function of the namespace is explained by itself; `bool` and `bfloat16` are methods of torch, too."""
    names = [name for entry in EXPRESSION_TABLE.split(";") for name in entry.rpartition(":")[2].split()]
    assert sorted(names) == sorted(EXPRESSIONS)
    listed = {*EXPRESSIONS} & {*graph_namespace.__all__} - {"bool", "bfloat16"}
    assert listed == {name for name in listed if EXPRESSIONS[name].startswith(f"xp.{name}(")}


def test_a_name_without_a_counterpart() -> None:
    """Nothing is listed that does not exist, whatever NumPy has."""
    for name in (*dir(np), *dir(np.ndarray), "scatter_add", "backward"):
        named = set(re.findall(r"xp\.(\w+)", function_hint(name, graph_namespace)))
        assert named <= set(graph_namespace.__all__), name
