"""The fused operators of com.microsoft, which onnxruntime alone has.

MultiHeadAttention is on the CPU the one kernel without a matrix of scores. GroupQueryAttention is causal, with
grouped heads, windows and sinks.
"""

from __future__ import annotations

import math

from .. import _arrays as xp
from .._arrays import ops
from .._call.call import ExportCall
from .._call.mask_analysis import is_lower_triangle, is_window, key_window, unmasked
from .._graph import CONTRIB, Graph, GraphValue
from .._runtime.defects import known_defects
from .._runtime.releases import Runtime, release_text
from ..lowering.tile import GraphTile
from .form import Form, FormInputs, finished_outputs, read_inputs

RANK = 4
EMPTY_SINCE = known_defects()["empty batch"].until
"""The first release in which MultiHeadAttention takes an empty batch or length."""
WIDTHS = 8
"""The widths of GroupQueryAttention must be a multiple of this."""
ALL = -1
"""The value of `local_window_size` for no window: all keys up to the query's own."""
WINDOW_COUNTS_ITSELF = known_defects()["window of other keys"].until
"""From this release on, a window counts the query's own key; before, only the keys to its left (issue 25927 of
onnxruntime). So no graph with a window is right on both sides of it."""


def _unsupported_by_multi_head(call: ExportCall, runtime: Runtime) -> str | None:
    if common := unsupported_by_contrib(call):
        return common
    if call.sizes.query_heads != call.sizes.heads:
        return "MultiHeadAttention has no grouped heads"
    if missing := MULTI_HEAD.missing_option(call):
        return missing
    if not unmasked(call) and not is_lower_triangle(call):
        return "MultiHeadAttention gives NaN for empty rows, and misplaces the diagonal where L is not S"
    sizes = (*call.sizes.batch, call.sizes.queries, call.sizes.keys)
    if runtime.is_before(EMPTY_SINCE) and any(isinstance(size, str) for size in sizes):
        release = release_text(EMPTY_SINCE)
        return f"before onnxruntime {release} it takes no empty batch, so the lengths must be numbers"
    return None


def _write_multi_head(graph: Graph, call: ExportCall) -> dict[str, GraphValue]:
    """query, key, value -> Transpose, Reshape -> MultiHeadAttention -> Reshape, Transpose."""
    # The CPU has a kernel for float32 alone; CUDA for half dtypes too.
    dtype = call.query.dtype if graph.runtime.provider == "cuda" else "float32"
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


MULTI_HEAD = Form(
    "multi_head",
    _write_multi_head,
    _unsupported_by_multi_head,
    nodes="`com.microsoft.MultiHeadAttention`",
    operator="MultiHeadAttention",
    empty_since=EMPTY_SINCE,
    wrong_on={"onnx": "MultiHeadAttention is no operator of the standard"},
)


def _unsupported_by_grouped_query(call: ExportCall, runtime: Runtime) -> str | None:
    if common := unsupported_by_contrib(call):
        return common
    if call.cached:
        return "the exporter writes GroupQueryAttention without its cache inputs"
    if call.sizes.queries != call.sizes.keys:
        return "GroupQueryAttention is written only for as many keys as queries"
    before, after = key_window(call.masks)
    if after != 0:
        return "GroupQueryAttention is causal"
    if not all(map(is_window, call.masks)) or (before is not None and before < 0):
        return "GroupQueryAttention supports only the causal mask and one causal window"
    if call.value.shape[-1] != call.sizes.width or call.sizes.width % WIDTHS:
        return "GroupQueryAttention takes one width, a multiple of 8"
    if runtime.provider == "cuda" and call.query.dtype == "float32":
        return "GroupQueryAttention has no float32 kernel on CUDA, so onnxruntime would run it on the CPU"
    if call.sinks is not None and call.sinks.shape != (call.sizes.query_heads,):
        return "GroupQueryAttention takes sinks of shape (Hq,)"
    if isinstance(call.sizes.batch[0], str):
        return "GroupQueryAttention takes no empty batch, so the batch must be a number"
    if before is not None and runtime.is_before(WINDOW_COUNTS_ITSELF):
        since = release_text(WINDOW_COUNTS_ITSELF)
        return (
            f"a window of GroupQueryAttention has one key less from onnxruntime {since} on than before, "
            f"so that a graph is right from {since} on at the earliest, and `runtime` is {runtime}"
        )
    return None


def _write_grouped_query(graph: Graph, call: ExportCall) -> dict[str, GraphValue]:
    """query, key, value -> Transpose, Reshape -> GroupQueryAttention -> Reshape, Transpose."""
    # On the CPU half dtypes are computed in float32; CUDA has kernels for half dtypes alone.
    dtype = call.query.dtype if graph.runtime.provider == "cuda" else "float32"
    inputs = read_inputs(graph, call, dtype)
    sinks = None
    if call.sinks is not None:
        sinks = GraphTile.of_all_pairs(inputs.lengths, inputs.key).operand(call.sinks).astype(dtype)
    # The operator copies its inputs, so an even number of key heads goes through it in two halves.
    parts = 2 if call.sizes.heads % 2 == 0 else 1
    query, key, value = (_split(array, parts, axis=1) for array in (inputs.query, inputs.key, inputs.value))
    split_sinks = [None] * parts if sinks is None else _split(sinks, parts, axis=0)
    lengths = _lengths(inputs)
    halves = [_node(call, lengths, *operands) for operands in zip(query, key, value, split_sinks, strict=True)]
    output = halves[0] if parts == 1 else xp.concat(halves, axis=1)
    return finished_outputs(inputs, {"output": xp.where(_holds_nan(inputs), math.nan, output)})


def _node(
    call: ExportCall,
    lengths: tuple[GraphValue, GraphValue],
    query: GraphValue,
    key: GraphValue,
    value: GraphValue,
    sinks: GraphValue | None,
) -> GraphValue:
    """Write the node; all keys are real."""
    before, _ = key_window(call.masks)
    graph, heads, groups = query.graph, int(query.dims[-3]), int(key.dims[-3])
    sides = [packed(array) for array in (query, key, value)]
    # The past key and value are left out, and in front of the sinks four more optional inputs.
    operands = [*sides, None, None, *lengths, *([] if sinks is None else [*[None] * 4, sinks])]
    # The caches that it returns are not used, but releases before 1.28 do not load a node without them.
    output, *_ = graph.add_many(
        "GroupQueryAttention",
        *operands,
        outputs=[(query.elem_type, sides[0].dims), (query.elem_type, key.dims), (query.elem_type, value.dims)],
        domain=CONTRIB,
        num_heads=heads,
        kv_num_heads=groups,
        scale=call.scale,
        local_window_size=ALL if before is None else before + 1,  # a window counts the query's own key
        **GROUPED_QUERY.attributes(call),
    )
    return unpacked(output, heads)


def _holds_nan(inputs: FormInputs) -> GraphValue:
    """Return the rows whose query or own key holds a NaN, (B, Hq, L, 1).

    From 1.28 on the operator returns 0 there, and the library NaN.
    """
    call = inputs.call
    query, key = (ops.reduce("ReduceSum", array).astype("float32") for array in (inputs.query, inputs.key))
    group = call.sizes.query_heads // call.sizes.heads
    if group > 1:
        shape = (*key.dims[:2], group, *key.dims[2:])
        times = query.graph.constant([1, 1, group, 1, 1], "int64")
        repeated = xp.broadcast_to(xp.expand_dims(key, axis=2), times, dims=shape)
        key = xp.reshape(repeated, [0, call.sizes.query_heads, -1, 1], dims=query.dims)
    return (query != query) | (key != key)


def _split(value: GraphValue, parts: int, axis: int) -> list[GraphValue]:
    """value -> Split into equal parts along `axis`."""
    if parts == 1:
        return [value]
    size = int(value.dims[axis]) // parts
    shape = (*value.dims[:axis], size, *value.dims[axis + 1 :])
    sizes = value.graph.constant([size] * parts, "int64")
    return value.graph.add_many("Split", value, sizes, outputs=[(value.elem_type, shape)] * parts, axis=axis)


def _lengths(inputs: FormInputs) -> tuple[GraphValue, GraphValue]:
    """Return seqlens_k, which is S - 1 for each batch entry, and the largest S."""
    lengths, batch = inputs.lengths, inputs.call.sizes.batch[0]
    last = xp.expand_dims(lengths.keys, axis=0) - 1
    repeated = lengths.graph.add("Expand", last, lengths.length(batch), dtype="int64", shape=(batch,))
    return repeated.astype("int32"), lengths.keys.astype("int32")  # the operator takes int32 alone


GROUPED_QUERY = Form(
    "grouped_query",
    _write_grouped_query,
    _unsupported_by_grouped_query,
    nodes="`com.microsoft.GroupQueryAttention`",
    operator="GroupQueryAttention",
    takes=("softcap", "sinks"),
    wrong_on={
        "openvino": "OpenVINO cannot read GroupQueryAttention without its cache inputs",
        "onnx": "GroupQueryAttention is no operator of the standard",
    },
)
