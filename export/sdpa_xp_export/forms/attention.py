"""ai.onnx Attention, opset 23 and 24: one node that a runtime may give a fused kernel."""

from __future__ import annotations

import math

import numpy as np

from sdpa_xp_export import pieces
from sdpa_xp_export.call import Call
from sdpa_xp_export.forms.inputs import Inputs, read
from sdpa_xp_export.graph import Graph, Value
from sdpa_xp_export.runtime import Runtime

RANK = 4


def refusal(call: Call) -> str | None:
    """Why this form cannot state the call; None where it can."""
    ranks = {len(spec.shape) for spec in (call.query, call.key, call.value)}
    if max(ranks) > RANK:
        return "ai.onnx Attention takes at most 4 axes"
    if len({spec.shape[:-3] for spec in (call.query, call.key, call.value)}) > 1:
        return "ai.onnx Attention does not broadcast the batch of query, key and value"
    if call.query.dtype == "float64":
        return "onnxruntime computes a float64 Attention to float32 accuracy"
    return None


def write(graph: Graph, call: Call, runtime: Runtime) -> Value:
    """query, key, value, mask -> Attention(query, key, value, mask), its inputs mended as below.

    On the CPU the kernel of a half dtype overflows in its scores, so there it computes in float32; and so it
    does wherever two biases have to be added.
    """
    two_biases = call.bias is not None and call.attn_mask is not None and call.attn_mask.floating
    dtype = call.query.dtype if runtime.provider == "cuda" and not two_biases else "float32"
    inputs = read(graph, call, dtype, RANK)
    query, scale = inputs.query, call.scale
    if scale <= 0:  # the runtime takes its root
        query, scale = pieces.with_number(graph, "Mul", query, -1.0 if scale else 0.0), -scale or 1.0
    mask = _mask(graph, inputs)
    key, value = inputs.key, inputs.value
    if mask is not None:
        allowed = mask if mask.dtype == "bool" else pieces.not_masked(graph, mask)
        if call.is_causal and mask.shape[-2] != 1:
            allowed = pieces.combine(graph, "And", allowed, pieces.causal(graph, query, key))
        seen = pieces.attended(graph, allowed, int(key.shape[-3]))
        key, value = (pieces.where(graph, seen, each, 0.0) for each in (key, value))
        mask = _exact(graph, mask, query, key)
    present = [query, key, value] + ([] if mask is None else [mask])
    output = graph.add(
        "Attention",
        *present,
        dtype=dtype,
        shape=(*query.shape[:-1], value.shape[-1]),
        scale=scale,
        softcap=call.softcap or 0.0,
        is_causal=int(call.is_causal),
    )
    ranks = (len(spec.shape) for spec in (call.query, call.key, call.value))
    output = pieces.squeeze_front(graph, output, max(ranks))
    return pieces.cast(graph, output, call.query.dtype)


def _mask(graph: Graph, inputs: Inputs) -> Value | None:
    """mask, bias -> the one mask of the node: the bias with -inf where the mask is False.

    The runtime holds a row whose entries are all the smallest finite number for empty, but only -inf masks:
    so what is finite becomes at least nearly the smallest.
    """
    bias = inputs.bias
    if bias is None:
        return inputs.mask
    least = float(np.finfo(bias.dtype).min) * (1 - 2**-10)
    bias = pieces.where(graph, pieces.not_masked(graph, bias), pieces.at_least(graph, bias, least), -math.inf)
    return bias if inputs.mask is None else pieces.where(graph, inputs.mask, bias, -math.inf)


def _exact(graph: Graph, mask: Value, query: Value, key: Value) -> Value:
    """mask -> Expand(mask, (L, S)): the runtime broadcasts batch and heads alone."""
    wanted = (query.shape[-2], key.shape[-2])
    if mask.shape[-2:] != wanted:
        lengths = [pieces.length(graph, each, -2) for each in (query, key)]
        target = graph.add("Concat", *lengths, dtype="int64", shape=(2,), axis=0)
        mask = graph.add("Expand", mask, target, dtype=mask.dtype, shape=pieces.joint_shape(mask.shape, wanted))
    return mask if mask.rank == 2 else pieces.to_rank(graph, mask, RANK)
