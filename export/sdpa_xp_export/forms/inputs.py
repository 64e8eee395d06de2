"""What every form begins with: query, key and value, in one dtype, with the cache in front of the new keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from sdpa_xp import checks
from sdpa_xp_export._array_api import ops
from sdpa_xp_export._call.call import ExportCall
from sdpa_xp_export._call.mask_analysis import cuts_keys
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export.lowering import heads
from sdpa_xp_export.lowering.tile import GraphLengths


@dataclass(frozen=True, slots=True)
class FormInputs:
    """query (..., Hq, L, E), key (..., H, S, E), value (..., H, S, Ev), with the heads before the length."""

    pairs: GraphLengths
    query: GraphValue
    key: GraphValue
    value: GraphValue
    present: dict[str, GraphValue] = field(default_factory=dict)
    """The cache with the new tokens in it, as the graph returns it."""


def read_inputs(
    graph: Graph, call: ExportCall, dtype: str, rank: int = 3, *, append: bool = True, in_place: bool = False
) -> FormInputs:
    """Inputs of the graph -> inputs in `dtype` with at least `rank` axes.

    With `append` the keys are those of the cache and the new ones; `in_place` by an operator that can write
    them into the cache (opset 24).
    """
    pairs = GraphLengths(graph, call)
    given = {name: graph.argument(name, spec) for name, spec in call.inputs.items()}
    present = {}
    for name in ("key", "value"):
        if call.past_key is not None and append:
            past, new = given[f"past_{name}"], given[name]
            present[f"present_{name}"] = given[name] = _appended(pairs, past, new, in_place=in_place)
    query, key, value = (
        ops.to_rank(heads.in_layout(given[name].astype(dtype), call.layout), rank)
        for name in ("query", "key", "value")
    )
    if cuts_keys(call):
        key, value = (_first_keys(pairs, each) for each in (key, value))
    return FormInputs(pairs, query, key, value, present)


def finished_outputs(inputs: FormInputs, made: dict[str, GraphValue]) -> dict[str, GraphValue]:
    """What a form made -> the outputs of the call, in its dtype, layout and rank."""
    call = inputs.pairs.call
    outputs = {}
    for name in call.outputs:
        value = made[name] if call.sizes.flat is False else ops.squeeze_front(made[name], _rank(name) - 1)
        value = heads.in_layout(value, call.layout) if name == "output" else value
        outputs[name] = value if name == "lse" else value.astype(call.query.dtype)
    return outputs | inputs.present


def _rank(name: str) -> int:
    return 2 if name == "lse" else 3


def _appended(pairs: GraphLengths, past: GraphValue, new: GraphValue, *, in_place: bool) -> GraphValue:
    """past, new -> Concat; or, where the past has room, the new tokens written behind its last ones."""
    call = pairs.call
    axis = -2 if call.layout == checks.HLE else -3
    if call.past_lengths is None:
        return ops.join([past, new], new.ndim + axis, call.sizes.keys)
    graph = pairs.graph
    filled = graph.argument("past_lengths", call.past_lengths).astype("int64")
    if in_place:
        return graph.add("TensorScatter", past, new, filled, dtype=past.dtype, shape=past.shape, axis=axis)
    count = ops.scalar(pairs.length(call.key.shape[axis]))
    ones = [1] * (new.ndim - 1)
    first = ops.reshape(filled, [-1, *ones], (*filled.shape, *ones))
    shape = [1] * new.ndim
    shape[axis] = -1
    steps = ops.arange(count, call.key.shape[axis])
    steps = ops.reshape(steps, shape, tuple(new.shape[axis] if n == -1 else 1 for n in shape))
    lengths = graph.add("Shape", new, dtype="int64", shape=(new.ndim,))
    index = ops.expand(first + steps, lengths, new.shape)
    return graph.add(
        "ScatterElements", past, index, new, dtype=past.dtype, shape=past.shape, axis=new.ndim + axis
    )


def _first_keys(pairs: GraphLengths, value: GraphValue) -> GraphValue:
    """(..., S, E) -> the first L of them."""
    zero = pairs.graph.constant([0], "int64")
    return ops.cut(value, (zero, pairs.length(pairs.call.sizes.queries)), -2, "first_keys")
