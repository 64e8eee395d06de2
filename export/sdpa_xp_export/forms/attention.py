"""ai.onnx Attention, opset 23 and 24: one node that a runtime may give a fused kernel."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from sdpa_xp_export import functions, pieces
from sdpa_xp_export.array import Value
from sdpa_xp_export.call import Call
from sdpa_xp_export.forms.inputs import Inputs, finished, read
from sdpa_xp_export.graph import Graph
from sdpa_xp_export.lowering.attend import all_allowed, scaled
from sdpa_xp_export.lowering.biases import biased, is_added
from sdpa_xp_export.lowering.masks import Allowed, both
from sdpa_xp_export.lowering.pairs import Tile
from sdpa_xp_export.runtime import Runtime
from sdpa_xp_export.structure import hides_keys, is_causal

RANK = 4


def refusal(call: Call, _runtime: Runtime) -> str | None:
    """Why this form cannot state the call; None where it can."""
    specs = (call.query, call.key, call.value)
    if max(len(spec.shape) for spec in specs) > RANK:
        return "ai.onnx Attention takes at most 4 axes"
    if len({spec.shape[:-3] for spec in specs}) > 1:
        return "ai.onnx Attention does not broadcast the batch of query, key and value"
    if call.held == "float64":
        return "onnxruntime computes a float64 Attention to float32 accuracy"
    if call.sinks is not None:
        return "ai.onnx Attention has no sinks"
    if call.outputs != ("output",):
        return "ai.onnx Attention gives no lse, and its weights and scores are not those of the library"
    if not all(is_added(bias) for bias in call.biases):
        return "ai.onnx Attention takes no function of the scores"
    return None


def write(graph: Graph, call: Call, runtime: Runtime) -> dict[str, Value]:
    """query, key, value, mask -> Attention(query, key, value, mask), its inputs mended as below.

    On the CPU the kernel of a half dtype overflows in its scores, so there it computes in float32; and so it
    does wherever two biases have to be added.
    """
    dtype = call.query.dtype if runtime.provider == "cuda" and len(call.biases) < 2 else "float32"
    inputs = read(graph, call, dtype, RANK)
    tile = inputs.pairs.whole(inputs.key)
    query, scale = _scaled(tile, inputs.query)
    key, value = inputs.key, inputs.value
    causal = any(is_causal(mask) for mask in call.masks) and not call.cached
    mask, may = _mask(tile, dtype, causal)
    if hides_keys(call):
        seen = both(may, all_allowed(tile, [each for each in call.masks if causal and is_causal(each)]))
        guard = pieces.attended(cast(Value, seen), int(key.shape[-3]))
        key, value = (functions.where(guard, each, 0.0) for each in (key, value))
    present = [query, key, value] if mask is None else [query, key, value, _exact(inputs, mask)]
    output = graph.add(
        "Attention",
        *present,
        dtype=dtype,
        shape=(*query.shape[:-1], value.shape[-1]),
        scale=scale,
        softcap=call.softcap or 0.0,
        is_causal=int(causal),
    )
    ranks = [len(spec.shape) for spec in (call.query, call.key, call.value)]
    return finished(inputs, {"output": pieces.squeeze_front(output, max(3, *ranks))})


def _scaled(tile: Tile, query: Value) -> tuple[Value, float]:
    """query, scale -> the query and a positive scale, of which the runtime takes the root."""
    scale = tile.call.scale
    if not isinstance(scale, float):
        return scaled(tile, query), 1.0
    if scale > 0:
        return query, scale
    return query * (-1.0 if scale else 0.0), -scale or 1.0


def _mask(tile: Tile, dtype: str, causal: bool) -> tuple[Value | None, Allowed]:
    """masks, biases -> the one mask of the node, and which pairs may attend by it.

    The mask is the bias with -inf where a pair may not attend. The runtime holds a row whose entries are all
    the smallest finite number for empty, but only -inf masks: so what is finite becomes at least nearly the
    smallest.
    """
    call = tile.call
    given = all_allowed(tile, [mask for mask in call.masks if not (causal and is_causal(mask))])
    if not call.biases:
        return (None if given is True else cast(Value, given)), given
    total, given = biased(call.biases, tile, tile.graph.constant(0.0, dtype), given)
    least = float(np.finfo("float16" if dtype == "bfloat16" else dtype).min) * (1 - 2**-10)
    total = pieces.at_least(total, least)
    return (total if given is True else functions.where(cast(Value, given), total, -math.inf)), given


def _exact(inputs: Inputs, mask: Value) -> Value:
    """mask -> Expand(mask, (L, S)): the runtime broadcasts batch and heads alone."""
    pairs, wanted = inputs.pairs, (inputs.query.shape[-2], inputs.key.shape[-2])
    if mask.shape[-2:] != wanted:
        columns = pairs.kept_keys if wanted[1] == "first_keys" else pairs.keys
        ends = [pieces.unsqueeze(each, 0) for each in (pairs.queries, columns)]
        mask = pieces.expand(mask, pieces.join(ends), wanted)
    return mask if mask.ndim == 2 else pieces.to_rank(mask, RANK)
