"""What every form begins with: the inputs, in one dtype, and only the keys that can be attended."""

from __future__ import annotations

from dataclasses import dataclass

from sdpa_xp_export import pieces
from sdpa_xp_export.call import Call
from sdpa_xp_export.graph import Graph, Value


@dataclass(frozen=True, slots=True)
class Inputs:
    """query (..., Hq, L, E), key (..., H, S, E), value (..., H, S, Ev), and what masks and biases them."""

    query: Value
    key: Value
    value: Value
    mask: Value | None
    """Boolean, at least 2 axes, broadcasts to (..., Hq, L, S)."""
    bias: Value | None
    """Floating, likewise; -inf masks."""


def read(graph: Graph, call: Call, dtype: str, rank: int = 3) -> Inputs:
    """Inputs of the graph -> inputs in `dtype` with at least `rank` axes.

    A floating attn_mask and a bias become their sum. Under is_causal no query attends a key beyond the
    first L, so these are cut off (and a NaN in them with them).
    """
    values = {name: graph.input(name, spec) for name, spec in call.inputs.items()}
    if call.is_causal and _more_keys_than_queries(call):
        count = pieces.length(graph, values["query"], -2)
        axes = {"key": -2, "value": -2, "attn_mask": -1, "bias": -1}
        for name, axis in axes.items():
            if name in values:
                values[name] = pieces.first_keys(graph, values[name], count, axis)
    for name in ("attn_mask", "bias"):
        if name in values:
            values[name] = pieces.to_rank(graph, values[name], 2)
    masks = [value for name, value in values.items() if name == "attn_mask" and value.dtype == "bool"]
    biases: list[Value] = [
        pieces.cast(graph, value, dtype)
        for name, value in values.items()
        if name in ("attn_mask", "bias") and value.dtype != "bool"
    ]
    if len(biases) == 2:
        biases = [pieces.add_biases(graph, biases[0], biases[1])]
    query, key, value = (
        pieces.to_rank(graph, pieces.cast(graph, values[name], dtype), rank)
        for name in ("query", "key", "value")
    )
    return Inputs(query, key, value, masks[0] if masks else None, biases[0] if biases else None)


def _more_keys_than_queries(call: Call) -> bool:
    """Whether S > L cannot be ruled out now."""
    queries, keys = call.sizes.queries, call.sizes.keys
    if isinstance(queries, int) and isinstance(keys, int):
        return keys > queries
    return queries != keys
