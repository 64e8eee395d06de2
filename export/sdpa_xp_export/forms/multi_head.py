"""com.microsoft MultiHeadAttention: on the CPU the one kernel of onnxruntime without a matrix of scores."""

from __future__ import annotations

from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.mask_analysis import is_lower_triangle, unmasked
from sdpa_xp_export._graph.finished_model import CONTRIB
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._runtime.releases import EMPTY_INPUTS, Runtime
from sdpa_xp_export.forms import contrib
from sdpa_xp_export.forms.inputs import finished_outputs, read_inputs


def unsupported_reason(call: ExportCall, runtime: Runtime) -> str | None:
    """Return why this form cannot state the call; None if it can."""
    if common := contrib.unsupported_reason(call):
        return common
    if call.sizes.query_heads != call.sizes.heads:
        return "MultiHeadAttention has no grouped heads"
    if call.softcap is not None or call.sinks is not None:
        return "MultiHeadAttention has neither a soft cap nor sinks"
    if not unmasked(call) and not is_lower_triangle(call):
        return "MultiHeadAttention gives NaN for empty rows, and misplaces the diagonal where L is not S"
    sizes = (*call.sizes.batch, call.sizes.queries, call.sizes.keys)
    if runtime.release < EMPTY_INPUTS["multi_head"] and any(isinstance(size, str) for size in sizes):
        release = ".".join(map(str, EMPTY_INPUTS["multi_head"]))
        return f"before onnxruntime {release} it crashes on an empty batch, so the lengths must be numbers"
    return None


def write(graph: Graph, call: ExportCall, runtime: Runtime) -> dict[str, GraphValue]:
    """query, key, value -> Transpose, Reshape -> MultiHeadAttention -> Reshape, Transpose."""
    # The CPU has a kernel for float32 alone; CUDA for half dtypes too.
    dtype = call.query.dtype if runtime.provider == "cuda" else "float32"
    inputs = read_inputs(graph, call, dtype)
    heads = call.sizes.query_heads
    # Key and value with 4 axes would spare two Transposes, but lose the kernel without a matrix of scores.
    query, key, value = (contrib.packed(array) for array in (inputs.query, inputs.key, inputs.value))
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
    return finished_outputs(inputs, {"output": contrib.unpacked(output, heads)})
