"""A layer takes inputs of its own dtype: its call, `to_onnx`, `jit` and `verify_layer` say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdpa_xp.layers import Linear, MultiHeadAttention
from sdpa_xp_export import TensorSpec, jit, to_onnx, verify_layer

HEADS = MultiHeadAttention.init(np.random.default_rng(0), 16, num_heads=2)
LAYERS: dict[str, Callable[[str], Any]] = {
    "heads": lambda dtype: HEADS.to(dtype=dtype),
    "a map": lambda dtype: HEADS.query.to(dtype=dtype),
    "a function": lambda dtype: lambda x: HEADS.to(dtype=dtype)(x, is_causal=True),
    "a method": lambda dtype: HEADS.to(dtype=dtype).weights,
}
X = np.random.default_rng(1).standard_normal((2, 3, 16))
NUMPY = ("float16", "float32", "float64")


def spec(dtype: str) -> TensorSpec:
    return TensorSpec(dtype, ("B", "L", 16))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("inputs", NUMPY)
@pytest.mark.parametrize("weights", NUMPY)
def test_all_four_take_or_refuse_the_same(name: str, weights: str, inputs: str) -> None:
    layer = LAYERS[name](weights)
    x = X.astype(inputs)
    others = LAYERS[name](inputs)
    runs: list[Any] = [lambda: layer(x), lambda: to_onnx(layer, spec(inputs)), lambda: jit(layer)(x)]
    if weights == inputs:
        for run in runs:
            run()
        return
    runs.append(lambda: verify_layer(to_onnx(others, spec(inputs)), layer))
    for run in runs:
        with pytest.raises(TypeError, match="must have one dtype") as error:
            run()
        assert f"layer.to(dtype='{inputs}')" in str(error.value)
        assert f".dtype={inputs}, " in str(error.value)
    layer_there = layer.to(dtype=inputs) if isinstance(layer, MultiHeadAttention | Linear) else others
    assert layer_there(x).dtype == inputs  # as the hint says


@pytest.mark.usefixtures("short_verify")
@pytest.mark.parametrize("dtype", NUMPY)
def test_a_layer_that_was_converted_agrees(dtype: str) -> None:
    layer = HEADS.to(dtype=dtype)
    model = to_onnx(layer, spec(dtype))
    kinds = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    assert kinds == {{"float16": 10, "float32": 1, "float64": 11}[dtype]}
    assert verify_layer(model, layer).agrees


@pytest.mark.needs("torch")
@pytest.mark.usefixtures("short_verify")
def test_bfloat16() -> None:
    """NumPy has none: the layer is one of torch."""
    import torch

    layer = HEADS.to(torch, dtype="bfloat16")
    assert verify_layer(to_onnx(layer, spec("bfloat16")), layer).agrees
    for wrong in (torch.float16, torch.float32):
        x = torch.asarray(X).to(wrong)
        name = str(wrong).removeprefix("torch.")
        for run in (lambda: layer(x), lambda: jit(layer)(x), lambda: to_onnx(layer, spec(name))):  # noqa: B023
            with pytest.raises(TypeError, match=rf"layer\.to\(dtype='{name}'\)"):
                run()
