"""Linear attention and the causal convolution in graphs: ONNX's operators, or the library's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from linear_cases import RULES, assert_as_onnx, draw, onnx_cases

from sdpa_xp import causal_conv_with_state, linear_attention
from sdpa_xp_export import TensorSpec, jit, to_onnx, verify_layer

pytestmark = pytest.mark.usefixtures("short_verify")
OPERATORS = {"LinearAttention": linear_attention, "CausalConvWithState": causal_conv_with_state}
OLD = "onnxruntime>=1.26;cpu"


def layer(
    query: Any, key: Any, value: Any, decay: Any = None, beta: Any = None, past: Any = None, **rules: Any
) -> Any:
    return linear_attention(query, key, value, decay=decay, beta=beta, state=past, **rules)


def specs(rule: str, length: int | str, dtype: str = "float32") -> dict[str, TensorSpec]:
    arrays, batch = draw(rule, 3, dtype), 2 if isinstance(length, int) else "B"
    arrays["past"] = arrays.pop("state")
    shapes = {
        name: (batch, *x.shape[1:]) if name == "past" else (batch, x.shape[1], length, x.shape[-1])
        for name, x in arrays.items()
    }
    return {name: TensorSpec(arrays[name].dtype.name, shape) for name, shape in shapes.items()}


DRAW = {
    "decay": lambda rng, shape: -rng.choice((0.0, 0.01, 2.0, 20.0), shape),
    "beta": lambda rng, shape: rng.random(shape),
    "key": lambda rng, shape: 0.3 * rng.standard_normal(shape),
}


def operators(model: Any) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == "com.microsoft"]


@pytest.mark.parametrize("form", ["auto", "primitive"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_all_cases_of_the_operators(operator: str, form: str) -> None:
    for name, arrays, rules, outputs in onnx_cases(operator):
        inputs = {"past" if n == "state" else n: x for n, x in arrays.items()}

        def call(past: Any = None, rules: Any = rules, **inputs: Any) -> Any:
            return OPERATORS[operator](**inputs, state=past, **rules)

        model = to_onnx(call, **{n: TensorSpec(x.dtype.name, x.shape) for n, x in inputs.items()}, form=form)
        assert operators(model) == [operator] * (form == "auto")
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        results = session.run(None, {n: np.ascontiguousarray(x) for n, x in inputs.items()})
        assert_as_onnx(results, outputs, name)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rule", RULES)
def test_open_lengths_are_one_operator(rule: str, dtype: str) -> None:
    named = specs(rule, "L", dtype)
    model = to_onnx(layer, **named)
    assert operators(model) == ["LinearAttention"]
    assert verify_layer(model, layer, draw={name: draw for name, draw in DRAW.items() if name in named}).agrees


@pytest.mark.parametrize("runtime", [OLD, "onnxruntime>=1.28;cuda", "onnx"])
def test_fixed_lengths_are_traced_where_there_is_no_operator(runtime: str) -> None:
    named = specs("gated_delta", 11)
    model = to_onnx(layer, **named, runtime=runtime, chunk_size=4)
    assert operators(model) == []
    if "cuda" not in runtime:
        assert verify_layer(model, layer, draw=DRAW, chunk_size=4).agrees


def test_layouts_and_broadcast_decay() -> None:
    """A decay for each head alone, and inputs with the heads after the length."""
    named = {
        name: TensorSpec("float32", ("B", "L", heads, 8))
        for name, heads in (("query", 4), ("key", 2), ("value", 2))
    }
    named["decay"] = TensorSpec("float32", (1, 2, 1))
    model = to_onnx(layer, **named, layout="...LHE")
    assert operators(model) == ["LinearAttention"]
    drawn = {"key": DRAW["key"], "decay": lambda rng, shape: -rng.random(shape)}
    assert verify_layer(model, layer, draw=drawn, layout="...LHE").agrees


@pytest.mark.parametrize("form", ["auto", "primitive"])
def test_the_convolution_has_open_lengths_in_both_forms(form: str) -> None:
    def convolve(x: Any, weight: Any, bias: Any, past: Any) -> Any:
        return causal_conv_with_state(x, weight, bias, past, activation="silu")

    shapes = {"x": ("B", 3, "L"), "weight": (3, 1, 4), "bias": (3,), "past": ("B", 3, 3)}
    model = to_onnx(
        convolve, **{name: TensorSpec("float32", shape) for name, shape in shapes.items()}, form=form
    )
    assert operators(model) == ["CausalConvWithState"] * (form == "auto")
    assert verify_layer(model, convolve).agrees


def test_a_step_of_decoding_runs_in_a_jit() -> None:
    arrays = draw("gated_delta", 5, "float32")
    arrays["past"] = arrays.pop("state")
    run = jit(layer)
    expected, past, outputs = layer(**arrays), arrays.pop("past"), []
    for token in range(5):
        output, past = run(**{name: x[..., token : token + 1, :] for name, x in arrays.items()}, past=past)
        outputs.append(output)
    np.testing.assert_allclose(np.concatenate(outputs, axis=-2), expected.output, atol=2e-6)
    np.testing.assert_allclose(past, expected.state, atol=2e-6)


SCANNED: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"primitive, {rule}": (rule, "float32", {"form": "primitive"}) for rule in RULES},
    "no operator": ("gated_delta", "float32", {"runtime": OLD}),
    "any program": ("gated_delta", "float16", {"runtime": "onnx"}),
    "scale": ("delta", "float32", {"scale": 0}),
    "float64": ("gated", "float64", {}),
}


@pytest.mark.parametrize("case", SCANNED)
def test_open_lengths_without_an_operator_are_a_scan(case: str) -> None:
    """Also of no token at all, which returns the state."""
    rule, dtype, options = SCANNED[case]
    named, rules = specs(rule, "L", dtype), {"scale": 0} if "scale" in options else {}
    model = to_onnx(layer, **named, **options)
    assert operators(model) == []
    assert [node.op_type for node in model.graph.node].count("Scan") == 1
    drawn = {name: draw for name, draw in DRAW.items() if name in named}
    assert verify_layer(model, layer, draw=drawn, **rules).agrees
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    arrays = draw(rule, 0, dtype)
    output, state = session.run(None, {"past" if name == "state" else name: x for name, x in arrays.items()})
    assert output.shape[-2] == 0
    np.testing.assert_array_equal(state, arrays["state"])


@pytest.mark.parametrize("batch", ["B", 2])
def test_a_scan_has_either_layout_and_no_state(batch: int | str) -> None:
    heads = {"query": (4, 8), "key": (2, 8), "value": (2, 5)}
    shapes: dict[str, Any] = {name: (batch, "L", *last) for name, last in heads.items()} | {"decay": (1, 2, 1)}
    named = {name: TensorSpec("float32", shape) for name, shape in shapes.items()}
    model = to_onnx(layer, **named, layout="...LHE", form="primitive")
    drawn = {"key": DRAW["key"], "decay": lambda rng, shape: -rng.random(shape)}
    assert verify_layer(model, layer, draw=drawn, layout="...LHE").agrees


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (
        {"query": TensorSpec("float32", ("B", "Hq", "L", 8))},
        "the heads and the width of `query` must be",
    ),
    "no heads": ({"key": TensorSpec("float32", ("B", "L", 8))}, "the heads and the width of `key` must be"),
    "width": (
        {"value": TensorSpec("float32", ("B", 2, "L", "Ev"))},
        "the heads and the width of `value` must be",
    ),
    "batches": (
        {"form": "primitive", "key": TensorSpec("float32", (1, 2, "L", 8))},
        "must have heads and one batch",
    ),
    "rule": ({"rule": "linear"}, "takes no `decay`"),
    "state": ({"past": TensorSpec("float32", ("B", 2, 8, 4))}, "`state` must have the shape"),
    "dtype": ({"beta": TensorSpec("float16", ("B", 2, "L", 1))}, "must have one dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_open_lengths_are_refused(case: str) -> None:
    changed, words = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=r"^to_onnx: ") as caught:
        to_onnx(layer, **{**specs("gated_delta", "L"), **changed})
    assert words in str(caught.value)
