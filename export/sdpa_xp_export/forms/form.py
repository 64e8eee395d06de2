"""What a form is, and how each begins and ends: inputs in one dtype and layout, and the outputs of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import _arrays as xp
from .._arrays import ops
from .._call.call import OPTIONS, ExportCall, FormName
from .._call.mask_analysis import cuts_keys
from .._call.operands import AXES, IN_DTYPE_OF_QUERY
from .._graph import Graph, GraphValue
from .._runtime.defects import Release, first_right
from .._runtime.releases import OLDEST, OPSETS, Runtime, RuntimeProvider
from ..lowering.tile import GraphLengths
from ..lowering.tile_attention import in_layout


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write calls as graphs, and what was measured of it in the releases of onnxruntime."""

    name: FormName
    write: Callable[[Graph, ExportCall], dict[str, GraphValue]]
    """Writes the nodes of a call, and returns the outputs by name."""
    unsupported_reason: Callable[[ExportCall, Runtime], str | None] = lambda _call, _runtime: None
    """Returns why the form cannot state a call. What a newer release removes comes after all other reasons."""
    nodes: str = ""
    """The operators that it writes, as the docs show them."""
    operator: str = ""
    """The fused operator, as reasons name it; "" for a form in primitives, which take every option."""
    takes: tuple[str, ...] = ()
    """The options with a noun that the operator has. Calls with any other one, also a new one, are refused."""
    empty_since: Release = OLDEST
    """The first release in which an empty batch or length gives an empty result; before, it crashes."""
    opsets: range = OPSETS
    auto_opsets: range = OPSETS
    """The opsets in which `auto` may choose the form."""
    # At opset 18 each operator that is written here has a kernel for CUDA since 1.23; at later opsets some
    # have it since 1.27 only.
    default_opset: int = 18
    opset_of: Callable[[ExportCall], int] | None = None
    """Returns the default opset of a call, if calls have different ones."""
    wrong_on: Mapping[RuntimeProvider, str] = field(default_factory=dict)
    """Why a provider cannot compute the form, beside the known defects. On WebGPU, outputs of two forms are off
    by 0.1 to 1.5 in 1.30 and 1.31 if its FlashAttention uses the subgroups of an adapter;
    quality/runtime/browsers.py runs the others."""
    quadratic_on_cuda: Callable[[ExportCall, int | None], str | None] | None = None
    """Returns why CUDA's kernel for a call in an opset holds an array of L x S, if some do."""

    @property
    def since(self) -> Release:
        """The first release that computes every call that the form takes."""
        return first_right(self.name, OLDEST)

    def missing_option(self, call: ExportCall) -> str | None:
        """Return what the operator lacks that the call asks for; None if nothing."""
        lacks = {name: option for name, option in OPTIONS.items() if option.noun and name not in self.takes}
        if not self.operator or all(getattr(call, name) is None for name in lacks):
            return None
        first, *others = (option.noun for option in lacks.values())
        missing = f"neither {' nor '.join([first, *others])}" if others else f"no {first.removeprefix('a ')}"
        return f"{self.operator} has {missing}"

    def attributes(self, call: ExportCall) -> dict[str, Any]:
        """Return the options that the node has as attributes of the same names; 0 turns one off."""
        return {name: getattr(call, name) or 0.0 for name in self.takes if OPTIONS[name].kind == "number"}


@dataclass(frozen=True, slots=True)
class FormInputs:
    """query (..., Hq, L, E), key (..., H, S, E), value (..., H, S, Ev), with the heads before the length."""

    lengths: GraphLengths
    query: GraphValue
    key: GraphValue
    value: GraphValue
    present: dict[str, GraphValue] = field(default_factory=dict)
    """The cache with the new tokens in it, as the graph returns it."""

    @property
    def call(self) -> ExportCall:
        return self.lengths.call


def read_inputs(
    graph: Graph, call: ExportCall, dtype: str, rank: int = 3, *, append: bool = True, in_place: bool = False
) -> FormInputs:
    """Convert the inputs of the graph to `dtype`, with the heads before the length.

    Args:
        graph: The graph.
        call: The call.
        dtype: The dtype to compute in.
        rank: The axes that query, key and value get at least.
        append: Whether the new keys and values are joined to the cache; else the operator does it.
        in_place: Whether TensorScatter (opset 24) may write them into a padded cache.
    """
    lengths = GraphLengths(graph, call)
    arrays = {name: graph.argument(name) for name in call.inputs}
    present = {}
    for name in ("key", "value"):
        if call.past_key is not None and append:
            past, new = arrays[f"past_{name}"], arrays[name]
            present[f"present_{name}"] = arrays[name] = _appended(lengths, past, new, in_place=in_place)
    query, key, value = (
        ops.to_rank(in_layout(arrays[name].astype(dtype), call.layout), rank)
        for name in ("query", "key", "value")
    )
    if cuts_keys(call):
        first_keys = graph.constant([0], "int64"), lengths.length(call.sizes.queries)
        key, value = (ops.cut(array, first_keys, -2, "first keys") for array in (key, value))
    return FormInputs(lengths, query, key, value, present)


def finished_outputs(inputs: FormInputs, results: dict[str, GraphValue]) -> dict[str, GraphValue]:
    """Return the results of a form as the outputs of the call, in its dtype, layout and rank."""
    call = inputs.call
    outputs = {}
    for name in call.outputs:
        value = results[name]
        if call.sizes.is_2d:  # the call has neither heads nor a batch
            value = ops.squeeze_front(value, len(AXES[name]))
        value = in_layout(value, call.layout) if name == "output" else value
        outputs[name] = value.astype(call.query.dtype) if name in IN_DTYPE_OF_QUERY else value
    return outputs | inputs.present


def _appended(lengths: GraphLengths, past: GraphValue, new: GraphValue, *, in_place: bool) -> GraphValue:
    """past, new -> Concat; if the past has room, the new tokens written behind its last real ones."""
    call, graph, axis = lengths.call, lengths.graph, lengths.call.length_axis
    if call.past_lengths is None:
        return xp.concat([past, new], axis=axis)
    filled = graph.argument("past_lengths").astype("int64")
    if in_place:
        return graph.add("TensorScatter", past, new, filled, dtype=past.elem_type, shape=past.dims, axis=axis)
    # ScatterElements wants an index for each element: where the past ends, and a step more for each new token.
    count = ops.scalar(lengths.length(call.key.shape[axis]))
    ones = [1] * (new.ndim - 1)
    first = xp.reshape(filled, [-1, *ones], dims=(*filled.dims, *ones))
    shape = [1] * new.ndim
    shape[axis] = -1
    steps = xp.arange(0, count, length=call.key.shape[axis])
    steps = xp.reshape(steps, shape, dims=tuple(new.dims[axis] if n == -1 else 1 for n in shape))
    target = ops.shape_of(new)
    index = xp.broadcast_to(first + steps, target, dims=new.dims)
    return graph.add(
        "ScatterElements", past, index, new, dtype=past.elem_type, shape=past.dims, axis=new.ndim + axis
    )
