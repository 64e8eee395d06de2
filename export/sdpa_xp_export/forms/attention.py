"""ai.onnx Attention, opset 23 and later: one node that a runtime may give a fused kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np

from sdpa_xp.masks import Mask

from .. import _arrays as xp
from .._arrays import ops
from .._call.call import ExportCall
from .._call.mask_analysis import (
    counts_real_keys,
    hides_keys,
    holds_own_key,
    is_additive,
    is_causal,
    key_window,
    may_mask,
    only_appends,
    real_keys,
)
from .._graph import Graph, GraphValue
from .._runtime.releases import Runtime
from ..lowering.formula import AllowedPairs, all_allowed, biased, both_allow
from ..lowering.tile import GraphTile
from ..lowering.tile_attention import in_layout, is_attended
from .form import Form, FormInputs, finished_outputs, read_inputs

RANK = 4
LEAST = {"float16": -64992.0, "bfloat16": -(2.0**99), "float32": -(2.0**99)}
"""What the largest bias of a row must be at least on CUDA, by the dtype of the node: its kernels return 0 for a
row whose biases are all at most -1e30, or -65504 in float16."""
LEAST_ON_CPU = float(np.nextafter(np.finfo("float32").min, np.float32(0)))
"""The CPU returns 0 for a row whose scores are all the most negative number."""


def _unsupported_reason(call: ExportCall, runtime: Runtime) -> str | None:
    specs = (call.query, call.key, call.value)
    if max(spec.ndim for spec in specs) > RANK:
        return "ai.onnx Attention takes at most 4 axes"
    if len({spec.shape[:-3] for spec in specs}) > 1:
        return "ai.onnx Attention does not broadcast the batch of query, key and value"
    is_double = call.accumulation_dtype == "float64"
    if is_double and runtime.is_onnxruntime:
        return "onnxruntime computes a float64 Attention to float32 accuracy"
    if is_double and call.softcap and float(np.float32(call.softcap)) != call.softcap:
        return "ai.onnx Attention has a float32 `softcap`, and this one is no float32"
    if missing := ATTENTION.missing_option(call):
        return missing
    if of_weights := [name for name in call.outputs if name not in ("output", "lse", "weights", "scores")]:
        return f"ai.onnx Attention returns no {of_weights[0]}"
    if call.outputs != ("output",):
        return "ai.onnx Attention returns no lse, and its weights and scores differ from the library's"
    if not all(is_additive(bias) for bias in call.biases):
        return "ai.onnx Attention cannot apply a function to the scores"
    return None


def _quadratic_on_cuda(call: ExportCall, opset: int | None) -> str | None:
    """Return why the kernel that CUDA takes for the node holds an array of L x S; None if it holds none.

    Read from the kernels that onnxruntime-gpu 1.28 and 1.31 choose for compute capability 9.0.
    """
    counted = counts_real_keys(call) and (opset is None or opset >= 24)
    masks = [mask for mask in call.masks if not is_causal(mask)]
    if call.biases or not (counted or only_appends(call) or not (masks or call.cached)):
        return "CUDA's kernels take a mask or a bias as an L x S array"
    widths = int(call.query.shape[-1]), int(call.value.shape[-1])
    all_scores = "CUDA computes {} with all L x S scores in memory"
    if any(width % 8 for width in widths) or max(widths) > 1024:
        return all_scores.format("widths that are not multiples of 8, or above 1,024,")
    if call.sizes.query_heads != call.sizes.heads and (call.query.dtype == "float32" or widths[0] != widths[1]):
        return all_scores.format("grouped heads in float32, or with E != Ev,")
    return None


def _write(graph: Graph, call: ExportCall) -> dict[str, GraphValue]:
    """query, key, value -> Attention(query, key, value, mask, past, lengths), its inputs mended as below."""
    # On the CPU the scores of a half dtype overflow in the kernel, so it computes in float32. So it does where
    # two biases have to be added.
    dtype = "float64" if call.accumulation_dtype == "float64" else "float32"
    if graph.runtime.provider == "cuda" and len(call.biases) < 2:
        dtype = call.query.dtype
    opset = graph.settings.opset
    is_stated = is_causal if opset < 25 else partial(holds_own_key, call)  # windows are stated since 25
    if only_appends(call, is_stated):
        return _with_past(graph, call, dtype)
    inputs = read_inputs(graph, call, dtype, RANK, in_place=opset >= 24)
    if opset >= 24 and counts_real_keys(call, is_stated):  # nonpad_kv_seqlen is an input since opset 24
        return _with_lengths(inputs)
    return _with_mask(inputs, is_stated)


def _with_mask(inputs: FormInputs, is_stated: Callable[[Mask], bool]) -> dict[str, GraphValue]:
    """Write biases, and masks that the node does not state, as its mask; 0 in keys that no query attends."""
    call, key, value = inputs.call, inputs.key, inputs.value
    tile = GraphTile.of_all_pairs(inputs.lengths, key)
    # What the node states begins at the upper left; with a cache it is part of the mask.
    stated = [] if call.cached else [mask for mask in call.masks if is_stated(mask)]
    others = [mask for mask in call.masks if call.cached or not is_stated(mask)]
    # The sum begins in float32 or float64, since CUDA compares no bfloat16.
    allowed, zero = all_allowed(tile, others), tile.graph.constant(0.0, call.accumulation_dtype)
    total, allowed = biased(tile, zero, allowed)
    # With as many keys as queries, each query attends to its own key under what the node states.
    may_hide = others or call.sizes.queries != call.sizes.keys or any(map(may_mask, call.biases))
    reachable = both_allow(allowed, all_allowed(tile, stated)) if may_hide and hides_keys(call) else True
    mask: AllowedPairs
    if tile.graph.runtime.provider == "cuda":
        mask = _mask_on_cuda(tile, total, allowed, stated, key.elem_type)
    else:
        mask = _floating_mask(total, allowed) if call.biases else allowed
    if isinstance(reachable, GraphValue):
        # The operator adds -inf to masked scores, so a NaN in a key that no query attends would leak.
        attended = is_attended(reachable, int(key.dims[-3]))
        key, value = (xp.where(attended, array, 0.0) for array in (key, value))
    expanded = [_expanded_mask(inputs, mask)] if isinstance(mask, GraphValue) else []
    output, *_ = _node(tile, inputs.query, key, value, *expanded, masks=stated)
    return finished_outputs(inputs, {"output": output})


def _with_past(graph: Graph, call: ExportCall, dtype: str) -> dict[str, GraphValue]:
    """Write a cache in front of as many new keys as queries: its past goes in, and the present comes out."""
    inputs = read_inputs(graph, call, dtype, RANK, append=False)
    tile = GraphTile.of_all_pairs(inputs.lengths, inputs.key)
    past = [in_layout(graph.argument(name).astype(dtype), call.layout) for name in ("past_key", "past_value")]
    output, *present = _node(tile, inputs.query, inputs.key, inputs.value, None, *past, masks=call.masks)
    returned = {
        f"present_{name}": in_layout(value, call.layout).astype(call.query.dtype)
        for name, value in zip(("key", "value"), present, strict=True)
    }
    return finished_outputs(inputs, {"output": output}) | returned


def _with_lengths(inputs: FormInputs) -> dict[str, GraphValue]:
    """Write keys that are real up to a length: length -> nonpad_kv_seqlen, and 0 in the keys behind it."""
    call = inputs.call
    tile = GraphTile.of_all_pairs(inputs.lengths, inputs.key)
    lengths = inputs.lengths.filled
    if lengths is None:
        stated = tile.integers("attn_mask.key_lengths", real_keys(call), 0, call.sizes.keys)
        lengths = cast(GraphValue, stated)
    batch = call.sizes.batch[0]
    # The operator only adds -inf to the scores of other keys, so a NaN in them would leak in a kernel that does
    # not skip them: onnxruntime's does, ONNX's own reference does not.
    real = xp.expand_dims(tile.columns, axis=-1) < lengths
    key, value = (xp.where(real, array, 0.0) for array in (inputs.key, inputs.value))
    counted = xp.reshape(lengths, [-1], dims=(batch,))
    more = [None, None, None, counted]  # no mask, past key and past value
    output, *_ = _node(tile, inputs.query, key, value, *more, masks=call.masks if call.cached else ())
    return finished_outputs(inputs, {"output": output})


def _node(
    tile: GraphTile,
    query: GraphValue,
    key: GraphValue,
    value: GraphValue,
    *more: GraphValue | None,
    masks: Sequence[Mask],
) -> list[GraphValue]:
    """Write the node; `more` are the mask, past_key, past_value and nonpad_kv_seqlen; it states `masks`."""
    call = tile.call
    query, scale = _positive_scale(tile, query)
    outputs = [(query.elem_type, (*query.dims[:-1], value.dims[-1]))]
    if len(more) == 3:  # with a past, the runtime requires the present outputs
        outputs += [(query.elem_type, (*x.dims[:-2], call.sizes.keys, x.dims[-1])) for x in (key, value)]
    left, right = key_window(mask for mask in masks if not is_causal(mask))
    sizes = {"left_window_size": left, "right_window_size": right}
    options = ATTENTION.attributes(call) | {name: size for name, size in sizes.items() if size is not None}
    options |= {"scale": scale, "is_causal": int(any(map(is_causal, masks)))}
    output, *present = tile.graph.add_many("Attention", query, key, value, *more, outputs=outputs, **options)
    ranks = [spec.ndim for spec in (call.query, call.key, call.value)]
    return [ops.squeeze_front(result, max(3, *ranks)) for result in (output, *present)]


def _positive_scale(tile: GraphTile, query: GraphValue) -> tuple[GraphValue, float]:
    """query, scale -> a query and a positive scale: the runtime takes its root, and refuses 0 and below.

    The attribute is a float32, so that a float64 query is multiplied itself.
    """
    scale = tile.call.scale
    if not isinstance(scale, float):
        return query * tile.operand(scale).astype(query.elem_type), 1.0
    if query.elem_type == "float64":
        return query * scale, 1.0
    if scale > 0:
        return query, scale
    return query * (-1.0 if scale else 0.0), -scale or 1.0


def _floating_mask(total: GraphValue, allowed: AllowedPairs) -> GraphValue:
    """biases, pairs that may attend -> what is added to the scores."""
    return _masked(total if total.elem_type == "float64" else xp.maximum(total, LEAST_ON_CPU), allowed)


def _mask_on_cuda(
    tile: GraphTile, total: GraphValue, allowed: AllowedPairs, stated: Sequence[Mask], dtype: str
) -> AllowedPairs:
    """biases, pairs that may attend -> what is added to the scores, in `dtype`; True if nothing is.

    Of a boolean mask CUDA makes a finite number, which a large score exceeds.
    """
    if not tile.call.biases:
        return True if allowed is True else _masked(tile.graph.constant(0.0, dtype), allowed)
    masked = ops.to_rank(_masked(total, both_allow(allowed, all_allowed(tile, stated))), 1)
    largest = ops.reduce("ReduceMax", masked)
    if dtype == "float16":
        # A row below LEAST is moved up to it. Of an empty row, -inf - -inf would be NaN.
        largest = xp.maximum(largest, float(np.finfo("float32").min))
        return (masked - xp.minimum(largest - LEAST[dtype], 0.0)).astype(dtype)
    # A row below LEAST is multiplied by a power of two. Beside numbers that large, float32 keeps no digit of a
    # score, so it only matters which of them are equal, and which are smaller.
    return (masked * xp.where(largest < LEAST[dtype], 2.0**-30, 1.0)).astype(dtype)


def _masked(added: GraphValue, allowed: AllowedPairs) -> GraphValue:
    """what is added to the scores -> the same, and -inf for masked pairs."""
    return xp.where(allowed, added, -math.inf) if isinstance(allowed, GraphValue) else added


def _expanded_mask(inputs: FormInputs, mask: GraphValue) -> GraphValue:
    """mask -> Expand(mask, (L, S)): the runtime broadcasts the batch and the heads alone."""
    lengths, shape = inputs.lengths, (inputs.query.dims[-2], inputs.key.dims[-2])
    if mask.dims[-2:] != shape:
        columns = lengths.kept_keys if shape[1] == "first keys" else lengths.keys
        ends = [xp.expand_dims(length, axis=0) for length in (lengths.queries, columns)]
        mask = xp.broadcast_to(mask, xp.concat(ends), dims=shape)
    return mask if mask.ndim == 2 else ops.to_rank(mask, RANK)


ATTENTION = Form(
    "attention",
    _write,
    _unsupported_reason,
    nodes="`ai.onnx.Attention`",
    operator="ai.onnx Attention",
    takes=("softcap",),
    opsets=range(23, 28),
    # onnxruntime 1.32 has no kernel for Attention-25: it runs the function of ONNX, some 60 nodes.
    auto_opsets=range(23, 25),
    default_opset=23,
    opset_of=lambda call: 24 if counts_real_keys(call) else 23,  # the first in which the node takes key lengths
    quadratic_on_cuda=_quadratic_on_cuda,
)
