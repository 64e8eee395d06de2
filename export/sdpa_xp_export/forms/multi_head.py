"""com.microsoft MultiHeadAttention: on the CPU the one kernel of onnxruntime without a matrix of scores."""

from __future__ import annotations

from .. import _arrays as xp
from .._call.call import ExportCall
from .._call.mask_analysis import is_lower_triangle, unmasked
from .._graph import CONTRIB, Graph, GraphValue
from .._runtime.releases import Runtime
from .form import Form, finished_outputs, read_inputs

RANK = 4
EMPTY_SINCE = (1, 31)
"""The first release that takes an empty batch or length."""


def _unsupported_reason(call: ExportCall, runtime: Runtime) -> str | None:
    if common := unsupported_by_contrib(call):
        return common
    if call.sizes.query_heads != call.sizes.heads:
        return "MultiHeadAttention has no grouped heads"
    if missing := FORM.missing_option(call):
        return missing
    if not unmasked(call) and not is_lower_triangle(call):
        return "MultiHeadAttention gives NaN for empty rows, and misplaces the diagonal where L is not S"
    sizes = (*call.sizes.batch, call.sizes.queries, call.sizes.keys)
    if runtime.is_before(EMPTY_SINCE) and any(isinstance(size, str) for size in sizes):
        release = ".".join(map(str, EMPTY_SINCE))
        return f"before onnxruntime {release} it takes no empty batch, so the lengths must be numbers"
    return None


def _write(graph: Graph, call: ExportCall, runtime: Runtime) -> dict[str, GraphValue]:
    """query, key, value -> Transpose, Reshape -> MultiHeadAttention -> Reshape, Transpose."""
    # The CPU has a kernel for float32 alone; CUDA for half dtypes too.
    dtype = call.query.dtype if runtime.provider == "cuda" else "float32"
    inputs = read_inputs(graph, call, dtype)
    heads = call.sizes.query_heads
    # Key and value with 4 axes would spare two Transposes, but lose the kernel without a matrix of scores.
    query, key, value = (packed(array) for array in (inputs.query, inputs.key, inputs.value))
    output = graph.add(
        "MultiHeadAttention",
        query,
        key,
        value,
        dtype=dtype,
        shape=(*query.dims[:-1], value.dims[-1]),
        domain=CONTRIB,
        num_heads=heads,
        scale=call.scale,
        unidirectional=int(is_lower_triangle(call)),
    )
    return finished_outputs(inputs, {"output": unpacked(output, heads)})


def unsupported_by_contrib(call: ExportCall) -> str | None:
    """Return what no fused operator of com.microsoft can state; None if it is for the operator to say."""
    specs = (call.query, call.key, call.value)
    if any(spec.ndim != RANK for spec in specs) or len({spec.shape[0] for spec in specs}) > 1:
        return "com.microsoft operators take 4 axes with one batch"
    if call.accumulation_dtype == "float64":
        return "com.microsoft operators do not take float64"
    if call.outputs != ("output",):
        return "com.microsoft operators return only the output"
    if call.biases:  # MultiHeadAttention has an input for one, and its softmax of nothing but -inf is NaN
        return "com.microsoft operators give NaN for a row that a bias masks"
    if not isinstance(call.scale, float):
        return "com.microsoft operators take a scale that is a number"
    if call.scale == 0:
        return "com.microsoft operators read a scale of 0 as no scale"
    return None


def packed(value: GraphValue) -> GraphValue:
    """(B, H, L, E) -> (B, L, H * E)."""
    heads, width = int(value.dims[-3]), int(value.dims[-1])
    swapped = xp.moveaxis(value, -2, -3)
    return xp.reshape(swapped, [0, 0, heads * width], dims=(*swapped.dims[:2], heads * width))


def unpacked(value: GraphValue, heads: int) -> GraphValue:
    """(B, L, H * Ev) -> (B, H, L, Ev)."""
    width = int(value.dims[-1]) // heads
    split = xp.reshape(value, [0, 0, heads, width], dims=(*value.dims[:2], heads, width))
    return xp.moveaxis(split, -2, -3)


FORM = Form(
    "multi_head",
    _write,
    _unsupported_reason,
    nodes="`com.microsoft.MultiHeadAttention`",
    operator="MultiHeadAttention",
    empty_since=EMPTY_SINCE,
    wrong_on={
        "webgpu": "the WebGPU provider computes MultiHeadAttention wrong from 32 tokens on",
        "openvino": "OpenVINO's MultiHeadAttention masks with a finite number, which large scores exceed",
        "onnx": "MultiHeadAttention is no operator of the standard",
    },
)
