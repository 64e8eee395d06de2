"""Linear attention and its convolution as one node each, where onnxruntime has their operators.

com.microsoft's operators follow the text of LinearAttention-27 and CausalConvWithState-27 of ONNX, and are in
more releases: a graph has those of ONNX if opset 27 was asked for. Where neither computes a call, the library's
own code is traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from sdpa_xp import CausalConvState, LinearAttentionState
from sdpa_xp._checks.arrays import LHE, check_one_kind
from sdpa_xp._checks.linear import LinearShapes, check_convolution, check_linear_arrays, check_linear_shapes
from sdpa_xp._linear.chunks import Tokens, attend
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


def _domain(graph: Graph) -> str:
    return CONTRIB if graph.settings.opset < 27 else ""


def _write_attention(graph: Graph, values: Values, rules: Mapping[str, Any], reason: str | None) -> Any:
    """query, key, value -> Transpose, Reshape -> LinearAttention -> Reshape, Transpose."""
    check_linear_arrays(graph.function, values)
    for name in ("query", "key", "value"):
        heads = (-2 if rules["layout"] == LHE else -3,) if values[name].ndim > 2 else ()
        if not all(isinstance(values[name].dims[axis], int) for axis in (*heads, -1)):
            rule = f"the heads and the width of `{name}` must be numbers"
            raise ArgumentValueError(graph.function, rule, {f"{name}.shape": values[name].dims})
    dtype = "float64" if values["query"].elem_type == "float64" else "float32"
    shapes = {name: graph.loose(value.dims) for name, value in values.items()}
    call = check_linear_shapes(graph.function, cast(Any, shapes), dtype, **rules)
    reason = reason or _unsupported_shapes(call, values)
    if reason is not None:
        return (
            NotImplemented if isinstance(call.sizes.queries, int) else _write_scan(graph, call, values, dtype)
        )
    inputs = {name: packed(value) for name, value in _heads_first(call, values, "float32").items()}
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
        domain=_domain(graph),
        q_num_heads=call.sizes.query_heads,
        kv_num_heads=call.sizes.heads,
        update_rule=call.rule,
        scale=call.scale,
    )
    return _returned(call, values, unpacked(output, call.sizes.query_heads), state)


def _write_scan(graph: Graph, call: LinearShapes, values: Values, dtype: str) -> Any:
    """query, key, value -> Scan over the tokens, one by one, in the library's own code."""
    shapes = {f"{name}.shape": values[name].dims for name in ("query", "key", "value")}
    if len({(len(shape) > 2, shape[:-3]) for shape in shapes.values()} | {(True, call.sizes.batch)}) > 1:
        rule = "inputs with an open length (L) must have heads and one batch where no operator computes them"
        raise ArgumentValueError(graph.function, rule, shapes)
    tokens = _heads_first(call, values, dtype)
    query, state = tokens["query"], values.get("state")
    group, widths = (call.sizes.heads, call.sizes.group), map(int, call.state_shape[-2:])
    tokens = {name: xp.expand_dims(value, axis=-3) for name, value in tokens.items()}
    tokens["query"] = xp.reshape(query, (*query.shape[:-3], *group, *query.shape[-2:])) * call.scale
    axes = tokens["key"].shape[:-2]
    shape = (*axes, 1, *widths)
    zeros = graph.operand(xp.zeros(shape, dtype=dtype))
    start = zeros if state is None else xp.reshape(state.astype(dtype), shape)
    # In front is a token of zeros, which changes no state: onnxruntime's Scan fails if there is no token.
    moved = {name: xp.moveaxis(value, -2, 0) for name, value in tokens.items()}
    moved = {n: xp.concat([xp.zeros((1, *x.shape[1:]), dtype=dtype), x], axis=0) for n, x in moved.items()}
    body = graph.loop_body()
    before = body.input("State", dtype, start.dims)
    of_one = {name: body.input(name.title(), dtype, value.dims[1:]) for name, value in moved.items()}
    one = Tokens(*(xp.expand_dims(of_one[n], axis=-2) if n in of_one else None for n in Tokens._fields))
    output, after = attend(xp, one, before, 1)
    output = xp.squeeze(output, axis=-2)
    last, outputs = graph.add_many(
        "Scan",
        start,
        *moved.values(),
        outputs=[(dtype, start.dims), (dtype, (moved["query"].dims[0], *output.dims))],
        body=body.subgraph([body.copy(after), body.copy(output)]),
        num_scan_inputs=len(moved),
    )
    joined = xp.moveaxis(outputs[1:, ...], 0, -2)
    result = xp.reshape(joined, (*joined.shape[:-4], call.sizes.query_heads, *joined.shape[-2:]))
    return _returned(call, values, result, xp.reshape(last, (*axes[:-1], *shape[-2:])))


def _returned(call: LinearShapes, values: Values, result: GraphValue, state: GraphValue) -> Any:
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


def _heads_first(call: LinearShapes, values: Values, dtype: str) -> Values:
    """Return the tokens (..., heads, L, width) in a dtype, decay and beta for each token of each head."""
    tokens = {name: value.astype(dtype) for name, value in values.items() if name != "state"}
    if call.layout == LHE:
        tokens = {n: xp.moveaxis(x, -2, -3) if x.ndim > 2 else x for n, x in tokens.items()}
    shape = tokens["key"].shape[:-1]
    for name in tokens.keys() & {"decay", "beta"}:
        tokens[name] = xp.broadcast_to(tokens[name], (*shape, tokens[name].shape[-1]))
    return tokens


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
        domain=_domain(graph),
        activation="none" if activation is None else "silu",
    )
    return CausalConvState(output.astype(source.elem_type), state.astype(source.elem_type))
