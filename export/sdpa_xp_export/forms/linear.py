"""Linear attention and its convolution as one node each, where onnxruntime has their operators.

com.microsoft's operators follow the text of LinearAttention-27 and CausalConvWithState-27 of ONNX. They are
older, and no graph has opset 27 here. Where they do not compute a call, the library's own code is traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from sdpa_xp import CausalConvState, LinearAttentionState
from sdpa_xp._checks.arrays import LHE, check_one_kind
from sdpa_xp._checks.linear import LinearShapes, check_convolution, check_linear_arrays, check_linear_shapes
from sdpa_xp.errors import ArgumentValueError

from .. import _arrays as xp
from .._graph import CONTRIB, Graph, GraphValue
from .._runtime.releases import Runtime
from .contrib import packed, unpacked

SINCE = (1, 27)
"""The first release that has the operators."""
Values = dict[str, GraphValue]


def write_linear(
    graph: Graph, function: str, inputs: Mapping[str, object], rules: Mapping[str, object], form: str
) -> Any:
    """Return what the function would return; NotImplemented if its own code has to be traced."""
    arrays = {n: x for n, x in {**inputs, **rules}.items() if n in ARRAYS and x is not None}
    values = {n: graph.here(graph.operand(x)) for n, x in arrays.items()}
    others = {n: x for n, x in rules.items() if n not in ARRAYS}
    reason = _lack_of_operator(graph.runtime, form, values)
    write = _write_attention if function == "linear_attention" else _write_convolution
    return write(graph, values, others, reason)


ARRAYS = {"query", "key", "value", "decay", "beta", "state", "input", "weight", "bias"}


def _lack_of_operator(runtime: Runtime, form: str, values: Values) -> str | None:
    if runtime.provider != "cpu" or runtime.is_before(SINCE):
        return "the operator was tried on the CPU of onnxruntime 1.27 and later"
    if form == "primitive":
        return "`form` is 'primitive'"
    if any(value.elem_type == "float64" for value in values.values()):
        return "the operator does not compute float64"
    return None


def _write_attention(graph: Graph, values: Values, rules: Mapping[str, Any], reason: str | None) -> Any:
    """query, key, value -> Transpose, Reshape -> LinearAttention -> Reshape, Transpose."""
    check_linear_arrays(graph.function, values)
    dtype = "float64" if values["query"].elem_type == "float64" else "float32"
    shapes = {name: graph.loose(value.dims) for name, value in values.items()}
    call = check_linear_shapes(graph.function, cast(Any, shapes), dtype, **rules)
    reason = reason or _unsupported_shapes(call, values)
    if reason is not None:
        if isinstance(call.sizes.queries, int):
            return NotImplemented
        rule = "the length of `query` (L) must be a number if no operator computes linear attention"
        raise ArgumentValueError(graph.function, rule, {"L": call.sizes.queries, "reason": reason})
    heads_first = {name: _heads_first(value, call.layout) for name, value in values.items() if name != "state"}
    key = heads_first["key"]
    for name in heads_first.keys() & {"decay", "beta"}:
        shape = (*key.shape[:-1], heads_first[name].shape[-1])
        heads_first[name] = xp.broadcast_to(heads_first[name], shape)
    inputs = {name: packed(value) for name, value in heads_first.items()}
    if "state" in values:
        inputs["state"] = values["state"].astype("float32")
    width = int(values["value"].dims[-1])
    query = inputs["query"]
    batch, length, _ = query.dims
    output, state = graph.add_many(
        "LinearAttention",
        *(inputs.get(name) for name in ("query", "key", "value", "state", "decay", "beta")),
        outputs=[
            ("float32", (batch, length, call.sizes.query_heads * width)),
            ("float32", (batch, *call.state_shape[1:])),
        ],
        domain=CONTRIB,
        q_num_heads=call.sizes.query_heads,
        kv_num_heads=call.sizes.heads,
        update_rule=call.rule,
        scale=call.scale,
    )
    result = unpacked(output, call.sizes.query_heads)
    result = xp.moveaxis(result, -2, -3) if call.layout == LHE else result
    return LinearAttentionState(result.astype(values["query"].elem_type), state)


def _unsupported_shapes(call: LinearShapes, values: Values) -> str | None:
    shapes = [values[name].dims for name in ("query", "key", "value")]
    if any(len(shape) != 4 or shape[0] != shapes[0][0] for shape in shapes):
        return "the operator takes 4 axes with one batch"
    counts = (call.sizes.query_heads, call.sizes.heads, call.sizes.width, shapes[2][-1])
    if not all(isinstance(count, int) and count > 0 for count in counts):
        return "the operator needs the numbers of heads and the widths"
    return "the operator reads a scale of 0 as no scale" if call.scale == 0 else None


def _heads_first(value: GraphValue, layout: str) -> GraphValue:
    value = value.astype("float32")
    return xp.moveaxis(value, -2, -3) if layout == LHE and value.ndim > 2 else value


def _write_convolution(graph: Graph, values: Values, rules: Mapping[str, Any], reason: str | None) -> Any:
    """input, weight -> CausalConvWithState."""
    check_one_kind(graph.function, values)
    shapes = {name: graph.loose(value.dims) for name, value in values.items()}
    activation = rules["activation"]
    state_shape = check_convolution(graph.function, cast(Any, shapes), activation)
    source = values["input"]
    if reason is not None or source.ndim != 3:
        return NotImplemented
    inputs = {name: value.astype("float32") for name, value in values.items()}
    output, state = graph.add_many(
        "CausalConvWithState",
        *(inputs.get(name) for name in ("input", "weight", "bias", "state")),
        outputs=[("float32", source.dims), ("float32", (source.dims[0], *state_shape[1:]))],
        domain=CONTRIB,
        activation="none" if activation is None else "silu",
    )
    return CausalConvState(output.astype(source.elem_type), state.astype(source.elem_type))
