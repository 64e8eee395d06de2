"""The optimisers that the guide names, on each call of the feature table in the form `auto`: all are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from feature_calls import features
from tools.models import Arrays, drawn, run
from tools.results import CLOSE
from tools.tools import TOOLS

from sdpa_xp.layers import MultiHeadAttention
from sdpa_xp_export import TensorSpec, to_onnx
from sdpa_xp_export.export import export_call

NEEDS = {"onnxsim": "onnxsim", "onnxslim": "onnxslim", "onnxoptimizer": "onnxoptimizer"}
OPTIMIZERS = [
    *("optimizer of onnxscript", "rewriter of onnxscript", "onnxsim", "onnxslim", "onnxoptimizer"),
    *("saved by onnxruntime, ENABLE_BASIC", "saved by onnxruntime, ENABLE_ALL"),
]
INSTALLED = [
    pytest.param(tool, marks=[pytest.mark.needs(NEEDS[tool])] if tool in NEEDS else []) for tool in OPTIMIZERS
]
CALLS = features("float32")
CASES = [
    pytest.param(tool, name, marks=[pytest.mark.needs(NEEDS[tool])] if tool in NEEDS else [])
    for tool in OPTIMIZERS
    for name in CALLS
]


def feeds_of(model: onnx.ModelProto, length: int) -> Arrays:
    """Inputs that no mask refuses: integers are 0 to 2, and all lengths are equal but the room of a cache."""
    names = {axis.dim_param for value in model.graph.input for axis in value.type.tensor_type.shape.dim}
    lengths = {name: length * len(name.split("+")) for name in (*names, "P", "S")}
    return drawn(model, lengths | {"B": 2, "R": 4 * length})


def assert_same(result: onnx.ModelProto | bytes, model: onnx.ModelProto, feeds: Arrays) -> None:
    for one, other in zip(run(result, feeds), run(model, feeds), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=0, atol=CLOSE * max(1.0, np.abs(other).max(initial=0.0)))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("tool", "name"), CASES)
@pytest.mark.filterwarnings("ignore")  # of the tools
def test_auto(tool: str, name: str) -> None:
    model = export_call(CALLS[name])
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    result = TOOLS[tool](copy)
    if isinstance(result, onnx.ModelProto):
        onnx.checker.check_model(result, full_check=True)
    assert_same(result, model, feeds_of(model, 5))


def two_bounds(x: Any) -> Any:
    """Two pairs of bounds of one number, which an optimiser may replace by two Clips."""
    xp = x.__array_namespace__()
    clipped = xp.clip(x, 0.0, 1.0) + xp.clip(x, -1.0, 2.0)
    return clipped + xp.minimum(xp.maximum(x, 0.5), 3.0) + xp.maximum(xp.maximum(x, -2.0), -3.0)


def equal_parts(x: Any) -> Any:
    """Selections, slices and lengths that are there twice."""
    xp = x.__array_namespace__()
    kept = x[x > 0] + x[0 < x]  # noqa: SIM300
    halves = xp.concat([x[x.shape[0] // 2 :], x[: x.shape[0] // 2]]) + x
    return xp.sum(kept) + xp.roll(halves, x.shape[0] // 2)


@pytest.mark.parametrize("shape", [("N",), (7,)])
@pytest.mark.parametrize("layer", [two_bounds, equal_parts])
@pytest.mark.parametrize("tool", INSTALLED)
@pytest.mark.filterwarnings("ignore")  # of the tools
def test_arrays(tool: str, layer: Any, shape: tuple[Any, ...]) -> None:
    model = to_onnx(layer, TensorSpec("float32", shape))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    result = TOOLS[tool](copy)
    for length in (7, 1, 12) if shape == ("N",) else (7,):
        feeds = {"x": np.random.default_rng(length).standard_normal(length).astype(np.float32)}
        assert_same(result, model, feeds)


@pytest.mark.parametrize("tool", INSTALLED)
@pytest.mark.filterwarnings("ignore")  # of the tools
def test_layers_in_a_row(tool: str) -> None:
    """onnxoptimizer 0.4.2 needs to leave out a pass, as the guide says."""
    heads = MultiHeadAttention.init(np.random.default_rng(0), 8, num_heads=2, like=np.ones(1, np.float32))
    model = to_onnx(lambda x: heads(heads(x)), TensorSpec("float32", ("B", "L", 8)))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if tool == "onnxoptimizer":
        import onnxoptimizer

        passes = [name for name in onnxoptimizer.get_fuse_and_elimination_passes() if name != "fuse_qkv"]
        result = onnxoptimizer.optimize(copy, passes)
    else:
        result = TOOLS[tool](copy)
    assert_same(result, model, {"x": np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)})
