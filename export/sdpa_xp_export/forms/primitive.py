"""MatMul, Softmax and Where: the form that every runtime since opset 17 computes to the contract."""

from __future__ import annotations

import math

from sdpa_xp_export import pieces
from sdpa_xp_export.call import Call
from sdpa_xp_export.forms.inputs import Inputs, read
from sdpa_xp_export.graph import Graph, Value
from sdpa_xp_export.runtime import Runtime


def refusal(_call: Call) -> str | None:
    """Why this form cannot state the call; it can state every one."""
    return None


def write(graph: Graph, call: Call, _runtime: Runtime) -> Value:
    """query, key, value -> MatMul -> softcap -> bias -> Where -> Softmax -> Where -> MatMul.

    Half inputs are computed in float32. A row without a key comes out of Softmax as NaN, and the Where
    behind it, which blanks masked pairs, makes it 0.
    """
    dtype = "float64" if call.query.dtype == "float64" else "float32"
    inputs = read(graph, call, dtype)
    allowed = _allowed(graph, call, inputs)
    weights = _softmax(graph, _scores(graph, call, inputs), allowed)
    value = inputs.value
    if allowed is not None and (inputs.mask is not None or inputs.bias is not None):
        seen = pieces.attended(graph, allowed, int(value.shape[-3]))
        value = pieces.where(graph, seen, value, 0.0)
    output = pieces.matmul_grouped(graph, weights, value)
    output = pieces.squeeze_front(graph, output, 2) if call.sizes.flat else output
    return pieces.cast(graph, output, call.query.dtype)


def _scores(graph: Graph, call: Call, inputs: Inputs) -> Value:
    """query, key -> (query * scale / softcap) @ key^T -> Tanh -> Mul softcap -> Add bias."""
    query = pieces.times(graph, inputs.query, call.scale / (call.softcap or 1.0))
    scores = pieces.matmul_grouped(graph, query, pieces.transpose(graph, inputs.key))
    if call.softcap is not None:
        scores = graph.add("Tanh", scores, dtype=scores.dtype, shape=scores.shape)
        scores = pieces.with_number(graph, "Mul", scores, call.softcap)
    return scores if inputs.bias is None else pieces.combine(graph, "Add", scores, inputs.bias)


def _allowed(graph: Graph, call: Call, inputs: Inputs) -> Value | None:
    """mask, causal, bias > -inf -> And of those that there are; None where every pair may attend."""
    parts = [] if inputs.mask is None else [inputs.mask]
    if call.is_causal:
        parts.append(pieces.causal(graph, inputs.query, inputs.key))
    if inputs.bias is not None:
        parts.append(pieces.not_masked(graph, inputs.bias))
    allowed = None
    for part in parts:
        allowed = part if allowed is None else pieces.combine(graph, "And", allowed, part)
    return allowed


def _softmax(graph: Graph, scores: Value, allowed: Value | None) -> Value:
    """scores, allowed -> Where(allowed, Softmax(Where(allowed, scores, -inf)), 0)."""
    if allowed is not None:
        scores = pieces.where(graph, allowed, scores, -math.inf)
    weights = graph.add("Softmax", scores, dtype=scores.dtype, shape=scores.shape, axis=-1)
    return weights if allowed is None else pieces.where(graph, allowed, weights, 0.0)
