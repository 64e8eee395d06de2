"""A call of the library on values of a graph -> the form that suits the call, written into that graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from sdpa_xp import AttentionState
from sdpa_xp._checks.arrays import HLE
from sdpa_xp._checks.keywords import check_block_size
from sdpa_xp._libraries.jets import Jet
from sdpa_xp._libraries.trees import leaves
from sdpa_xp.biases import Bias
from sdpa_xp.errors import ArgumentValueError
from sdpa_xp.masks import Mask

from .. import _arrays as xp
from .._arrays.dispatch import is_array_elsewhere
from .._call.arguments import warn_of_zeros_and_ones
from .._call.call import OPTIONS, ExportCall, FormName, checked_call
from .._call.operands import as_statistics, outputs_of, with_operands
from .._graph import Graph, GraphValue
from .._runtime.releases import Runtime
from ..spec import TensorSpec
from .choice import FORMS, choose
from .linear import write_linear

OUTPUTS = {
    "scaled_dot_product_attention": ("output",),
    "dot_product_attention": ("output",),
    "attention_state": ("output", "lse"),
    "attention_weights": ("weights",),
    "attention_scores": ("scores",),
    "KVCache.attend": ("output",),
    "KVCache.attend_state": ("output", "lse"),
    "attention_statistics": (),
}
"""The public functions that have forms, and the outputs of a graph that they return; `of` says which."""
LINEAR = ("linear_attention", "causal_conv_with_state")
"""The public functions that have an operator or are traced: no form of attention computes them."""


@dataclass(frozen=True, slots=True)
class ComputedSpec(TensorSpec):
    """A spec of an array that the graph computes, where an export has an input."""

    value: GraphValue


def write_call(graph: Graph, call: ExportCall, form: FormName) -> dict[str, GraphValue]:
    """Return the outputs of a call; what the graph has not computed becomes an input or an initializer."""
    named = {
        name: spec.value if isinstance(spec, ComputedSpec) else graph.input(name, spec.dtype, spec.shape)
        for name, spec in call.inputs.items()
    }
    named |= {name: graph.weight(name, constant.numbers) for name, constant in call.initializers.items()}
    part = graph.part_of_call(named, call.accumulation_dtype)
    written = {}
    for name, value in FORMS[form].write(part, call).items():
        # A name of a part, which has a space, may be that of another length in the next call.
        dims = [
            graph.lengths.fresh(length, value.name) if " " in str(length) else length for length in value.dims
        ]
        written[name] = GraphValue(graph, value.name, value.elem_type, tuple(dims))
    return written


@dataclass(frozen=True, slots=True)
class TracedAttention:
    """Writes each attention that a layer calls, in one form or in the one that suits each call best."""

    form: str
    runtime: Runtime
    opset: int | None = None
    """The opset that the caller asked for, or None."""
    written: list[tuple[ExportCall, FormName, str]] = field(default_factory=list)
    """Each attention so far, its form, and why that was chosen."""

    def __call__(
        self, graph: Graph, function: str, inputs: Mapping[str, object], rules: Mapping[str, object]
    ) -> Any:
        """Return what the library's `function` would return: a value, or a tuple of values with names."""
        if function in LINEAR and not _has_derivatives(inputs, rules):
            return write_linear(graph, function, inputs, rules, self.form)
        if function not in OUTPUTS or _has_derivatives(inputs, rules):  # the library's own code writes them
            return NotImplemented
        if rules.get("reproducible"):
            rule = "`reproducible` must be False, because each runtime adds in an order of its own"
            raise ArgumentValueError(graph.function, rule, {"reproducible": True})
        warn_of_zeros_and_ones(graph.function, graph.array_of(rules["attn_mask"]))
        arrays = {name: _value(graph, array) for name, array in inputs.items()}
        cached = function.startswith("KVCache.")
        values = _split_cache(graph, arrays, rules["layout"]) if cached else arrays
        adds_head = _is_one_head_each(values, rules)
        specs = {name: _spec(_with_head(value) if adds_head else value) for name, value in values.items()}
        specs.setdefault("value", specs["key"])  # weights and scores are computed without a value
        options = {
            # A class such as numpy.float64 looks like an array, so no word is converted.
            name: rules[name] if option.kind == "word" else _with_specs(graph, rules[name], adds_head)
            for name, option in OPTIONS.items()
            if name in rules
        }
        outputs = OUTPUTS[function] or outputs_of(cast(str, rules["of"]))
        options |= specs | {"outputs": outputs, "cached": cached}
        if rules.get("top_k"):
            options["top_k"] = operator.index(cast(int, rules["top_k"]))
        if rules.get("block_size"):
            options["block_size"] = check_block_size(graph.function, rules["block_size"])
        call = checked_call(graph.function, **options)
        form, reason = choose(graph.function, call, self.form, self.opset, self.runtime)
        self.written.append((call, form, reason))
        written = write_call(graph, call, form)
        returned = {name: xp.squeeze(value, axis=1) if adds_head else value for name, value in written.items()}
        # The operator returns the joined cache, so the layer's own Concat is left out if nothing else reads it.
        for name in ("key", "value"):
            if f"present_{name}" in returned:
                graph.equal_values[arrays[name].name] = returned[f"present_{name}"]
        results = [returned[name] for name in outputs]
        if function == "attention_statistics":
            return as_statistics(dict(zip(outputs, results, strict=True)))
        if len(results) == 1:
            return results[0]
        base = rules.get("lse_base")
        output, lse = results
        return AttentionState(output, lse if base is None else lse / math.log(cast(float, base)))


def _has_derivatives(*arguments: Mapping[str, object]) -> bool:
    """Return whether an array carries derivatives, also one that a mask or a bias holds."""
    values = tuple(value for mapping in arguments for value in mapping.values())
    return any(isinstance(leaf.array, Jet) for leaf in leaves(values))


def operand_sources(call: ExportCall, moved: Mapping[str, str]) -> dict[str, str]:
    """Return the input of the layer that each input of a traced call is; `moved` maps values to them."""
    values = {name: spec.value.name for name, spec in call.inputs.items() if isinstance(spec, ComputedSpec)}
    return {name: moved[value] for name, value in values.items() if value in moved}


def _split_cache(graph: Graph, values: Mapping[str, GraphValue], layout: object) -> dict[str, GraphValue]:
    """Split a joined cache into past and new keys and values; without appended tokens it stays whole."""
    joins = [graph.concatenated.get(values[name].name) for name in ("key", "value")]
    axis = -2 if layout == HLE else -3
    if any(join is None or join[0] != axis for join in joins):
        return dict(values)
    (_, past_key, key), (_, past_value, value) = (join for join in joins if join is not None)
    if past_key.dims[axis] != past_value.dims[axis]:  # the caller joined these, each at another place
        return dict(values)
    new = {"query": values["query"], "key": key, "value": value}
    return new | {"past_key": past_key, "past_value": past_value}


def _value(graph: Graph, array: object) -> GraphValue:
    return graph.here(array) if isinstance(array, GraphValue) else graph.from_array(array)


def _spec(value: GraphValue) -> ComputedSpec:
    return ComputedSpec(value.elem_type, value.graph.loose(value.dims), value)


def _with_specs(graph: Graph, argument: Any, adds_head: bool) -> Any:
    """Return an argument with specs instead of its arrays, also those that a mask or a bias holds."""
    if isinstance(argument, GraphValue) or is_array_elsewhere(argument):
        value = _value(graph, argument)
        return _spec(_with_head(value) if adds_head else value)
    if isinstance(argument, Mask | Bias):
        return with_operands(argument, lambda _, operand: _with_specs(graph, operand, adds_head))
    return argument


def _is_one_head_each(inputs: Mapping[str, GraphValue], rules: Mapping[str, object]) -> bool:
    """Return whether inputs (B, length, width), with a B that is not known, may get a head axis of length 1.

    Three axes are (heads, length, width), and a graph is written for a known number of heads. So B heads become
    B batch entries of one head, unless an argument tells heads apart other than by an axis of an array.
    """
    shapes = [value.dims for value in inputs.values()]
    if any(len(shape) != 3 or shape[0] != shapes[0][0] for shape in shapes) or isinstance(shapes[0][0], int):
        return False
    masks = all(_ignores_heads(rules[name]) for name in ("attn_mask", "bias"))
    return masks and rules["layout"] == HLE and rules["sinks"] is None


def _ignores_heads(argument: object) -> bool:
    if not isinstance(argument, Mask | Bias):
        return True
    return all(map(_ignores_heads, argument.parts)) if argument.parts else argument.ignores_heads


def _with_head(value: GraphValue) -> GraphValue:
    """(B, length, width) -> (B, 1, length, width); fewer axes have no heads."""
    return xp.expand_dims(value, axis=-3) if value.ndim == 3 else value
