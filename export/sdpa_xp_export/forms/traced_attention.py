"""A call of the library on values of a graph that is being traced -> the form that suits it, in that graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from sdpa_xp import AttentionState
from sdpa_xp.biases import Bias
from sdpa_xp.checks import HLE, message
from sdpa_xp.masks import Mask
from sdpa_xp_export._array_api import pieces, shaping
from sdpa_xp_export._array_api.dispatch import is_array
from sdpa_xp_export._call.call import Arguments
from sdpa_xp_export._call.checking import checked
from sdpa_xp_export._call.operands import with_operands
from sdpa_xp_export._graph.graph import Graph
from sdpa_xp_export._graph.traced_graph import Trace
from sdpa_xp_export._graph.value import Value
from sdpa_xp_export.forms.choice import FORMS, choose, fitting_opset
from sdpa_xp_export.spec import TensorSpec

OUTPUTS = {
    "scaled_dot_product_attention": ("output",),
    "dot_product_attention": ("output",),
    "attention_state": ("output", "lse"),
    "attention_weights": ("weights",),
    "attention_scores": ("scores",),
    "KVCache.attend": ("output",),
}


@dataclass(frozen=True, slots=True)
class Computed(TensorSpec):
    """What an export takes for an input, and is computed in the graph."""

    value: Value


def attend(graph: Graph, function: str, inputs: Mapping[str, object], rules: Mapping[str, object]) -> Any:
    """What the library's `function` would return: a value, or an AttentionState of values."""
    if not isinstance(graph, Trace) or function not in OUTPUTS:
        rule = f"a graph must be traced of {', '.join(OUTPUTS)} alone"
        raise TypeError(message(graph.function, rule, {"function": function}))
    whole = {name: _value(graph, array) for name, array in inputs.items()}
    cached = function == "KVCache.attend"
    values = _apart(graph, whole, rules["layout"]) if cached else whole
    single = _one_head_each(values, rules)
    specs = {name: _spec(_with_head(value) if single else value) for name, value in values.items()}
    named = {name: _in_place(graph, rules[name], single) for name in rules.keys() & {*Arguments._fields}}
    named |= {name: spec for name, spec in specs.items() if name.startswith("past_")}
    outputs = OUTPUTS[function]
    value = specs.get("value", specs["key"])  # weights and scores have none
    given = Arguments(**named)._replace(outputs=outputs, cached=cached)
    call = checked(graph.function, specs["query"], specs["key"], value, given)
    form, reason = choose(graph.function, call, graph.form, graph.opset, graph.target)
    fitting_opset(graph.function, form, graph.opset)
    graph.chosen.append((form, reason))
    values = {name: cast(Computed, spec).value for name, spec in call.inputs.items()}
    made = FORMS[form].write(graph.part(values, call.held), call, graph.target)
    found = {name: graph.here(shaping.squeeze(each, 1) if single else each) for name, each in made.items()}
    for name in ("key", "value"):
        if f"present_{name}" in found:
            graph.same[whole[name].name] = found[f"present_{name}"]
    results = [found[name] for name in outputs]
    if len(results) == 1:
        return results[0]
    base = rules.get("lse_base")
    output, lse = results
    return AttentionState(output, lse if base is None else lse / math.log(cast(float, base)))


def _apart(graph: Trace, values: Mapping[str, Value], layout: object) -> dict[str, Value]:
    """A cache as what it was before its newest tokens, and these; as it is where it was not appended to."""
    parts = [graph.joined.get(values[name].name) for name in ("key", "value")]
    axis = -2 if layout == HLE else -3
    if any(part is None or part[0] != axis for part in parts):
        return dict(values)
    (_, past_key, key), (_, past_value, value) = (part for part in parts if part is not None)
    if past_key.shape[axis] != past_value.shape[axis]:  # joined by the caller, each elsewhere
        return dict(values)
    new = {"query": values["query"], "key": key, "value": value}
    return new | {"past_key": past_key, "past_value": past_value}


def _value(graph: Trace, array: object) -> Value:
    return graph.here(array) if isinstance(array, Value) else graph.from_array(array)


def _spec(value: Value) -> Computed:
    return Computed(value.dtype, value.shape, value)


def _in_place(graph: Trace, rule: Any, single: bool) -> Any:
    """A keyword of a call, its arrays as specs; so those that a mask or a bias holds."""
    if isinstance(rule, Value) or is_array(rule):
        value = _value(graph, rule)
        return _spec(_with_head(value) if single else value)
    if isinstance(rule, Mask | Bias):
        return with_operands(rule, lambda _, each: _in_place(graph, each, single))
    return rule


def _one_head_each(inputs: Mapping[str, Value], rules: Mapping[str, object]) -> bool:
    """Whether inputs (B, length, width) are B heads of one group each, of a B that is not known.

    A graph is written for a number of heads; so they become one head of B entries, where no rule tells heads
    apart but by an axis of an array.
    """
    shapes = [value.shape for value in inputs.values()]
    if any(len(shape) != 3 or shape[0] != shapes[0][0] for shape in shapes) or isinstance(shapes[0][0], int):
        return False
    masks = all(_knows_no_heads(rules[name]) for name in ("attn_mask", "bias"))
    return masks and rules["layout"] == HLE and rules["sinks"] is None


def _knows_no_heads(rule: object) -> bool:
    if not isinstance(rule, Mask | Bias):
        return True
    if rule.parts:
        return all(map(_knows_no_heads, rule.parts))
    return rule.name in ("causal", "sliding_window", "chunked", "dilated", "from_array")


def _with_head(value: Value) -> Value:
    """(B, length, width) -> (B, 1, length, width); what has fewer axes has no heads."""
    return pieces.unsqueeze(value, -3) if value.ndim == 3 else value
