"""What graphs for CUDA add to the scores, computed as CUDA's kernels do: they have finite numbers for -inf.

No kernel runs here. The part of a graph that computes the mask runs on the CPU.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from internals import CPU, numpy_dtype, open_session, reference, run_session
from numpy.typing import NDArray

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention

L = 6
SENTINEL = {"float16": -65504.0, "bfloat16": -1e30, "float32": -1e30}
"""What CUDA adds for False, by the dtype of the node. A row whose biases are no larger gets 0."""


def spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(dtype, shape)


def mask_of(model: onnx.ModelProto, feeds: dict[str, NDArray[Any]]) -> tuple[NDArray[np.float32], str, bool]:
    """The mask of the Attention node in float32, the dtype of the node, and whether it is causal."""
    graph = model.graph
    (index,) = (index for index, node in enumerate(graph.node) if node.op_type == "Attention")
    node = graph.node[index]
    causal = any(attribute.name == "is_causal" and attribute.i for attribute in node.attribute)
    inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
    kinds = {value.name: value.type.tensor_type for value in inferred}
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kinds[node.input[3]].elem_type).name
    cast = onnx.helper.make_node("Cast", [node.input[3]], ["mask"], to=onnx.TensorProto.FLOAT)
    del graph.node[index:]
    del graph.output[:]
    graph.node.append(cast)
    graph.output.append(onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.FLOAT, None))
    names = [value.name for value in graph.input]
    return run_session(open_session(model, CPU), {name: feeds[name] for name in names})["mask"], dtype, causal


def as_cuda(scores: NDArray[Any], value: NDArray[Any], mask: NDArray[Any], sentinel: float) -> NDArray[Any]:
    """Attention as CUDA's kernels compute it, with 0 for rows whose biases are no larger than `sentinel`."""
    sums = (scores + mask).astype(np.float32)
    with np.errstate(invalid="ignore"):
        weights = np.exp(sums - sums.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    return np.where((mask > sentinel).any(-1, keepdims=True), weights, 0.0) @ value


def least(dtype: str) -> NDArray[Any]:
    """Biases, with rows of nothing but very negative numbers: equal ones, unlike ones, and beside -inf."""
    number = float(ml_dtypes.finfo(numpy_dtype(dtype)).min)
    array = np.zeros((L, L), numpy_dtype(dtype))
    array[0], array[1], array[2] = number, number / 2, -np.inf
    array[3], array[3, ::2] = number, number * (1 - 2.0**-6)
    array[4, 1:] = number
    array[5], array[5, 0] = number, -np.inf
    return array


LOWER = np.tri(L, dtype=bool)
BOOLEAN = np.random.default_rng(0).random((L, L)) < 0.6
CALLS: dict[str, Any] = {
    "a mask": lambda _: {"attn_mask": spec("bool", L, L)},
    "a window": lambda _: {"attn_mask": masks.sliding_window(2, 0)},
    "a bias": lambda dtype: {"bias": spec(dtype, L, L)},
    "a bias, causal": lambda dtype: {"bias": spec(dtype, L, L), "is_causal": True},
    "a bias and a mask": lambda dtype: {"bias": spec(dtype, L, L), "attn_mask": spec("bool", L, L)},
    "two biases": lambda dtype: {"bias": spec(dtype, L, L), "attn_mask": spec(dtype, L, L)},
    "slopes, causal": lambda dtype: {"bias": biases.alibi(spec(dtype, 1), offset=L), "is_causal": True},
}
ALLOWED = {"a mask": BOOLEAN, "a bias and a mask": BOOLEAN, "a window": LOWER & ~np.tri(L, k=-3, dtype=bool)}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", SENTINEL)
def test_a_finite_number_is_neither_a_mask_nor_a_masked_pair(dtype: str, name: str) -> None:
    qkv, runtime = spec(dtype, 1, 1, L, 4), "onnxruntime>=1.28;cuda"
    model = export_attention(qkv, qkv, qkv, **CALLS[name](dtype), form="attention", runtime=runtime)
    allowed = ALLOWED.get(name, LOWER if "causal" in name else np.ones((L, L), bool))
    slope = 6e4 if dtype == "float16" else 1e37
    feeds = {
        "query": np.zeros((1, 1, L, 4), numpy_dtype(dtype)),
        "key": np.zeros((1, 1, L, 4), numpy_dtype(dtype)),
        "value": np.zeros((1, 1, L, 4), numpy_dtype(dtype)),
        "attn_mask": BOOLEAN if name != "two biases" else np.zeros((L, L), numpy_dtype(dtype)),
        "bias": least(dtype),
        "slopes": np.asarray([slope], numpy_dtype(dtype)),
    }
    added = np.asarray(feeds["bias"], np.float64) if "bias" in name else np.zeros((L, L))
    if "slopes" in name:
        added = -float(feeds["slopes"][0]) * np.abs(np.arange(L)[:, None] + L - np.arange(L))
    mask, node_dtype, causal = mask_of(model, feeds)
    assert node_dtype in SENTINEL  # of a boolean mask CUDA would make a finite number
    mask = np.where(LOWER, mask, -np.inf) if causal else mask
    value = np.random.default_rng(1).normal(size=(L, 4))
    expected, *_ = reference.attention_and_scores(np.eye(L), np.zeros((L, L)), value, allowed, bias=(added,))
    # A masked pair may have any score. Without a bias, the others may also be far below the sentinel.
    for high, low in ((0.0, 0.0), (3e37, 0.0), (0.0, 0.0 if added.any() else -3e30)):
        scores = np.where(allowed & ~np.isneginf(added), low, high)
        result = as_cuda(scores, value, mask.reshape(L, L), SENTINEL[node_dtype])
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6)
