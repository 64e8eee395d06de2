"""Rotations against RotaryEmbedding-23: ONNX's own reference, and onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from sdpa_xp.positional import Llama3Scaling, Rotary, RotaryTables, Rotation, YaRNScaling

F = np.float32
LONGEST = 64
POSITIONS = np.asarray([[0, 1, 2, 3, 4], [9, 63, 0, 7, 7]])


def model_of(
    rotary: Rotation,
    width: int,
    dtype: Any,
    table: tuple[int, ...] | None = None,
    *,
    has_positions: bool = True,
) -> onnx.ModelProto:
    """One node."""
    real = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes: dict[str, tuple[int, Any]] = {
        "x": (real, (2, 3, 5, width)),
        "cos": (real, table or (LONGEST, rotary.width // 2)),
        "sin": (real, table or (LONGEST, rotary.width // 2)),
    }
    if has_positions:
        shapes["positions"] = onnx.TensorProto.INT64, (2, 5)
    inputs = [helper.make_tensor_value_info(name, *rest) for name, rest in shapes.items()]
    output = helper.make_tensor_value_info("y", real, (2, 3, 5, width))
    node = helper.make_node(
        "RotaryEmbedding",
        [*shapes],
        ["y"],
        interleaved=int(rotary.interleaved),
        rotary_embedding_dim=0 if rotary.width == width else rotary.width,
    )
    graph = helper.make_graph([node], "rotary", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    return model


def by_reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    (output,) = ReferenceEvaluator(model).run(None, feeds)
    return output


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, feeds)
    return output


@pytest.mark.parametrize("run", [by_reference, by_onnxruntime])
@pytest.mark.parametrize("scaling", [None, Llama3Scaling(8.0, 32), YaRNScaling(4.0, 32)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("width", [16, 8])
def test_same_numbers(run: Any, scaling: Any, interleaved: bool, width: int, rng: np.random.Generator) -> None:
    """Each product and each sum is rounded once on both sides: a few units of what is added."""
    rotary = Rotary(width, interleaved=interleaved, scaling=scaling)
    x = rng.standard_normal((2, 3, 5, 16)).astype(F)
    cos, sin = rotary.cos_sin(range(LONGEST), like=x)
    output = run(model_of(rotary, 16, F), {"x": x, "cos": cos, "sin": sin, "positions": POSITIONS})
    bound = 4 * 2.0**-23 * np.abs(x).max() * (1 if scaling is None else scaling.magnitude)
    np.testing.assert_allclose(rotary.apply(x, POSITIONS), output, rtol=0, atol=bound)
    assert np.abs(output - x).max() > 0.5


@pytest.mark.parametrize("by_entry", [False, True], ids=["positions", "without positions"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_any_tables(interleaved: bool, by_entry: bool, rng: np.random.Generator) -> None:
    """Numbers of no rotation, and tables with a row for each token, which ONNX takes without positions."""
    x = rng.standard_normal((2, 3, 5, 16)).astype(F)
    cos, sin = (rng.uniform(-2, 2, (2, 5, 8) if by_entry else (LONGEST, 8)).astype(F) for _ in range(2))
    rotary = RotaryTables(cos, sin, interleaved=interleaved)
    model = model_of(rotary, 16, F, cos.shape, has_positions=not by_entry)
    feeds = {"x": x, "cos": cos, "sin": sin} | ({} if by_entry else {"positions": POSITIONS})
    rotated = rotary.apply(x, 0 if by_entry else POSITIONS)
    np.testing.assert_allclose(
        rotated, by_onnxruntime(model, feeds), rtol=0, atol=16 * 2.0**-23 * np.abs(x).max()
    )
