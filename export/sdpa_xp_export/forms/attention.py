"""ai.onnx Attention, opset 23 and 24: one node that a runtime may give a fused kernel."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from sdpa_xp_export._array_api import namespace as xp
from sdpa_xp_export._array_api import ops
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.mask_analysis import counts_real_keys, hides_keys, is_causal, only_appends
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export._runtime.releases import Runtime
from sdpa_xp_export.forms.inputs import FormInputs, finished_outputs, read_inputs
from sdpa_xp_export.lowering import heads
from sdpa_xp_export.lowering.biases import add_biases, is_additive
from sdpa_xp_export.lowering.masks import AllowedPairs, both_allow
from sdpa_xp_export.lowering.tile import GraphTile
from sdpa_xp_export.lowering.tile_attention import all_allowed

RANK = 4


def refusal(call: ExportCall, _runtime: Runtime) -> str | None:
    """Why this form cannot state the call; None where it can."""
    specs = (call.query, call.key, call.value)
    if max(spec.ndim for spec in specs) > RANK:
        return "ai.onnx Attention takes at most 4 axes"
    if len({spec.shape[:-3] for spec in specs}) > 1:
        return "ai.onnx Attention does not broadcast the batch of query, key and value"
    if call.accumulation_dtype == "float64":
        return "onnxruntime computes a float64 Attention to float32 accuracy"
    if call.sinks is not None:
        return "ai.onnx Attention has no sinks"
    if call.outputs != ("output",):
        return "ai.onnx Attention gives no lse, and its weights and scores are not those of the library"
    if not all(is_additive(bias) for bias in call.biases):
        return "ai.onnx Attention takes no function of the scores"
    return None


def write(graph: Graph, call: ExportCall, runtime: Runtime) -> dict[str, GraphValue]:
    """query, key, value -> Attention(query, key, value, mask, past, lengths), its inputs mended as below.

    On the CPU the kernel of a half dtype overflows in its scores, so there it computes in float32; and so it
    does wherever two biases have to be added.
    """
    dtype = call.query.dtype if runtime.provider == "cuda" and len(call.biases) < 2 else "float32"
    if only_appends(call):
        return _with_past(graph, call, dtype)
    inputs = read_inputs(graph, call, dtype, RANK, in_place=graph.opset >= 24)
    if graph.opset >= 24 and counts_real_keys(call):
        return _with_lengths(inputs)
    tile = inputs.pairs.whole(inputs.key)
    key, value = inputs.key, inputs.value
    causal = any(is_causal(mask) for mask in call.masks) and not call.cached
    mask, may = _mask(tile, dtype, causal)
    if hides_keys(call):
        seen = both_allow(may, all_allowed(tile, [each for each in call.masks if causal and is_causal(each)]))
        if isinstance(seen, GraphValue):
            guard = heads.is_attended(seen, int(key.shape[-3]))
            key, value = (xp.where(guard, each, 0.0) for each in (key, value))
    exact = None if mask is None else _exact(inputs, mask)
    return finished_outputs(
        inputs, {"output": _node(tile, inputs.query, key, value, exact, is_causal=causal)[0]}
    )


def _with_past(graph: Graph, call: ExportCall, dtype: str) -> dict[str, GraphValue]:
    """A cache in front of as many new keys as queries: past_key, past_value -> Attention -> present ones."""
    inputs = read_inputs(graph, call, dtype, RANK, append=False)
    tile = inputs.pairs.whole(inputs.key)
    past = [
        heads.in_layout(graph.argument(f"past_{name}", spec).astype(dtype), call.layout)
        for name, spec in (("key", call.past_key), ("value", call.past_value))
        if spec is not None
    ]
    causal = bool(call.masks)
    output, *present = _node(tile, inputs.query, inputs.key, inputs.value, None, *past, is_causal=causal)
    returned = {
        f"present_{name}": heads.in_layout(each, call.layout).astype(call.query.dtype)
        for name, each in zip(("key", "value"), present, strict=True)
    }
    return finished_outputs(inputs, {"output": output}) | returned


def _with_lengths(inputs: FormInputs) -> dict[str, GraphValue]:
    """Keys that are real up to a length -> nonpad_kv_seqlen, with 0 in the keys and values behind it.

    The operator only adds -inf to their scores, so a NaN behind the length would leak wherever a kernel does
    not skip such keys: onnxruntime's does, ONNX's own reference does not.
    """
    call = inputs.pairs.call
    tile = inputs.pairs.whole(inputs.key)
    lengths = inputs.pairs.filled
    if lengths is None:
        (padding,) = call.masks
        lengths = cast(GraphValue, tile.integers("attn_mask.key_lengths", padding.arguments["key_lengths"]))
    batch = call.sizes.batch[0]
    real = ops.unsqueeze(tile.columns, -1) < lengths
    key, value = (xp.where(real, each, 0.0) for each in (inputs.key, inputs.value))
    counted = ops.reshape(lengths, [-1], (batch,))
    output, *_ = _node(
        tile,
        inputs.query,
        key,
        value,
        None,
        None,
        None,
        counted,
        is_causal=call.cached and bool(call.masks),
    )
    return finished_outputs(inputs, {"output": output})


def _node(
    tile: GraphTile,
    query: GraphValue,
    key: GraphValue,
    value: GraphValue,
    *more: GraphValue | None,
    is_causal: bool,
) -> list[GraphValue]:
    """The node; behind the mask come past_key, past_value and nonpad_kv_seqlen."""
    call = tile.call
    query, scale = _scaled(tile, query)
    given = [query, key, value, *more]
    while given[-1] is None:
        given.pop()
    outputs = [(query.dtype, (*query.shape[:-1], value.shape[-1]))]
    if len(more) == 3:
        outputs += [(query.dtype, (*x.shape[:-2], call.sizes.keys, x.shape[-1])) for x in (key, value)]
    output, *present = tile.graph.add_many(
        "Attention", *given, outputs=outputs, scale=scale, softcap=call.softcap or 0.0, is_causal=int(is_causal)
    )
    ranks = [spec.ndim for spec in (call.query, call.key, call.value)]
    return [ops.squeeze_front(each, max(3, *ranks)) for each in (output, *present)]


def _scaled(tile: GraphTile, query: GraphValue) -> tuple[GraphValue, float]:
    """query, scale -> the query and a positive scale, of which the runtime takes the root."""
    scale = tile.call.scale
    if not isinstance(scale, float):
        return query * tile.operand(scale).astype(query.dtype), 1.0
    if scale > 0:
        return query, scale
    return query * (-1.0 if scale else 0.0), -scale or 1.0


def _mask(tile: GraphTile, dtype: str, causal: bool) -> tuple[GraphValue | None, AllowedPairs]:
    """masks, biases -> the one mask of the node, and which pairs may attend by it.

    The mask is the bias with -inf where a pair may not attend. The runtime holds a row whose entries are all
    the smallest finite number for empty, but only -inf masks: so what is finite becomes at least nearly the
    smallest. It is made in float32, since CUDA compares no bfloat16.
    """
    call = tile.call
    given = all_allowed(tile, [mask for mask in call.masks if not (causal and is_causal(mask))])
    if not call.biases:
        return (None if given is True else cast(GraphValue, given)), given
    total, given = add_biases(call.biases, tile, tile.graph.constant(0.0, "float32"), given)
    least = float(np.finfo("float16" if dtype == "float16" else "float32").min) * (1 - 2**-7)
    total = xp.where(total < least, least, total)
    total = total if given is True else xp.where(cast(GraphValue, given), total, -math.inf)
    return total.astype(dtype), given


def _exact(inputs: FormInputs, mask: GraphValue) -> GraphValue:
    """mask -> Expand(mask, (L, S)): the runtime broadcasts batch and heads alone."""
    pairs, wanted = inputs.pairs, (inputs.query.shape[-2], inputs.key.shape[-2])
    if mask.shape[-2:] != wanted:
        columns = pairs.kept_keys if wanted[1] == "first_keys" else pairs.keys
        ends = [ops.unsqueeze(each, 0) for each in (pairs.queries, columns)]
        mask = ops.expand(mask, ops.join(ends), wanted)
    return mask if mask.ndim == 2 else ops.to_rank(mask, RANK)
