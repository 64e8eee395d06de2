"""com.microsoft GroupQueryAttention: causal attention with grouped heads, windows and sinks."""

from __future__ import annotations

import math

from sdpa_xp_export._array_api import namespace as xp
from sdpa_xp_export._array_api import ops
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.mask_analysis import is_causal
from sdpa_xp_export._graph.finished_model import CONTRIB
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._runtime.releases import WINDOW_COUNTS_ITSELF, Runtime
from sdpa_xp_export.forms import contrib
from sdpa_xp_export.forms.inputs import FormInputs, finished_outputs, read_inputs

WIDTHS = 8
ALL = -1
"""The window that is none: all keys up to the query's own."""


def refusal(call: ExportCall, runtime: Runtime) -> str | None:
    """Why this form cannot state the call; None where it can."""
    if common := contrib.refusal(call):
        return common
    if call.cached or call.sizes.queries != call.sizes.keys:
        return "GroupQueryAttention takes as many keys as queries here"
    if not any(is_causal(mask) for mask in call.masks):
        return "GroupQueryAttention is causal"
    if _left(call) is None:
        return "GroupQueryAttention has no masks but the diagonal and one window that ends there"
    if _left(call) != ALL and runtime.release < WINDOW_COUNTS_ITSELF:
        since = ".".join(map(str, WINDOW_COUNTS_ITSELF))
        return (
            f"a window of GroupQueryAttention has one key less from onnxruntime {since} on than before, "
            f"so that a graph is right from {since} on at the earliest, and `runtime` is {runtime}"
        )
    if call.value.shape[-1] != call.sizes.width or call.sizes.width % WIDTHS:
        return "GroupQueryAttention takes one width, a multiple of 8"
    if runtime.provider == "cuda" and call.query.dtype == "float32":
        return "GroupQueryAttention runs on the CPU in float32"
    if call.sinks is not None and call.sinks.shape != (call.sizes.query_heads,):
        return "GroupQueryAttention takes sinks of shape (Hq,)"
    if isinstance(call.sizes.batch[0], str):
        return "GroupQueryAttention of an empty batch ends the process: fix the batch"
    return None


def write(graph: Graph, call: ExportCall, runtime: Runtime) -> dict[str, GraphValue]:
    """query, key, value -> Transpose, Reshape -> GroupQueryAttention -> Reshape, Transpose.

    The operator copies all that it is given, so an even number of key heads goes through it in two halves.
    """
    dtype = call.query.dtype if runtime.provider == "cuda" else "float32"
    inputs = read_inputs(graph, call, dtype)
    sinks = None if call.sinks is None else inputs.pairs.whole(inputs.key).operand(call.sinks).astype(dtype)
    parts = 2 if call.sizes.heads % 2 == 0 else 1
    query, key, value = (_split(each, parts, axis=1) for each in (inputs.query, inputs.key, inputs.value))
    sinks_of = [None] * parts if sinks is None else _split(sinks, parts, axis=0)
    lengths, window = _lengths(inputs), _window(call)
    halves = [
        _node(call, q, k, v, lengths, of_heads, window)
        for q, k, v, of_heads in zip(query, key, value, sinks_of, strict=True)
    ]
    output = halves[0] if parts == 1 else ops.join(halves, 1, call.sizes.query_heads)
    return finished_outputs(inputs, {"output": xp.where(_no_number(inputs), math.nan, output)})


def _node(
    call: ExportCall,
    query: GraphValue,
    key: GraphValue,
    value: GraphValue,
    lengths: tuple[GraphValue, GraphValue],
    sinks: GraphValue | None,
    window: int,
) -> GraphValue:
    """All keys are real. The caches that it returns are named, or releases before 1.28 do not load it."""
    graph, heads, groups = query.graph, int(query.shape[-3]), int(key.shape[-3])
    packed = [contrib.packed(each) for each in (query, key, value)]
    given = [*packed, None, None, *lengths, *([] if sinks is None else [*[None] * 4, sinks])]
    output, *_ = graph.add_many(
        "GroupQueryAttention",
        *given,
        outputs=[(query.dtype, packed[0].shape), (query.dtype, key.shape), (query.dtype, value.shape)],
        domain=CONTRIB,
        num_heads=heads,
        kv_num_heads=groups,
        scale=call.scale,
        softcap=call.softcap or 0.0,
        local_window_size=window,
    )
    return contrib.unpacked(output, heads)


def _no_number(inputs: FormInputs) -> GraphValue:
    """Rows whose query or own key holds a NaN, (B, Hq, L, 1): the operator gives 0 there, from 1.28 on."""
    call = inputs.pairs.call
    query, key = (ops.reduce("ReduceSum", each).astype("float32") for each in (inputs.query, inputs.key))
    group = call.sizes.query_heads // call.sizes.heads
    if group > 1:
        shape = (*key.shape[:2], group, *key.shape[2:])
        times = query.graph.constant([1, 1, group, 1, 1], "int64")
        key = ops.reshape(
            ops.expand(ops.unsqueeze(key, 2), times, shape),
            [0, call.sizes.query_heads, -1, 1],
            query.shape,
        )
    return (query != query) | (key != key)


def _split(value: GraphValue, parts: int, axis: int) -> list[GraphValue]:
    """value -> Split into equal parts along `axis`."""
    if parts == 1:
        return [value]
    size = int(value.shape[axis]) // parts
    shape = (*value.shape[:axis], size, *value.shape[axis + 1 :])
    sizes = value.graph.constant([size] * parts, "int64")
    return value.graph.add_many("Split", value, sizes, outputs=[(value.dtype, shape)] * parts, axis=axis)


def _window(call: ExportCall) -> int:
    """How many keys a query sees, its own among them."""
    left = _left(call)
    return ALL if left is None or left == ALL else left + 1


def _lengths(inputs: FormInputs) -> tuple[GraphValue, GraphValue]:
    """seqlens_k, S - 1 for each batch entry, and the largest S."""
    pairs = inputs.pairs
    last = ops.unsqueeze(pairs.keys, 0) - 1
    batch = pairs.length(pairs.call.sizes.batch[0])
    each = pairs.graph.add("Expand", last, batch, dtype="int64", shape=(pairs.call.sizes.batch[0],))
    return each.astype("int32"), pairs.keys.astype("int32")


def _left(call: ExportCall) -> int | None:
    """How many earlier keys a query sees; None for masks that say something else."""
    windows = [mask.arguments for mask in call.masks if not is_causal(mask)]
    if not windows:
        return ALL
    window = windows[0]
    named = all(mask.name in ("causal", "sliding_window") for mask in call.masks)
    if len(windows) > 1 or not named or window.get("offset") != 0 or "left" not in window:
        return None
    left = window["left"]
    return ALL if left is None else int(str(left))
