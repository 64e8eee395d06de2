"""A graph that is written -> the model: outputs by name, opsets, metadata and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import helper

from sdpa_xp_export._dtypes.dtype import ONNX_DTYPE
from sdpa_xp_export._files.model import Model, with_weights, without_numbers, write_metadata
from sdpa_xp_export._graph.graph import Graph, GraphValue

CONTRIB = "com.microsoft"
"""The domain of onnxruntime's own operators."""
MATH_MODE = "no TF32 (CUDA: use_tf32=0)"
"""The math mode in which a model's numbers hold, and the option that a session on CUDA needs for it."""
_MOVING = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Expand")
"""Operators that change no integer but its dtype."""


def finished_model(graph: Graph, outputs: Mapping[str, GraphValue], metadata: Mapping[str, str]) -> Model:
    """Return the model, which has passed onnx.checker; its outputs get the names that they stand under."""
    names = {}
    for name, value in outputs.items():
        computed = any(value.name in node.output for node in graph.nodes)
        # An output of the graph must be an output of a node, and an input cannot be renamed.
        output = value if computed else graph.copy(value)
        names[output.name] = name
    _rename(graph.nodes, names)
    infos = [
        helper.make_tensor_value_info(name, ONNX_DTYPE[value.elem_type], value.dims)
        for name, value in outputs.items()
    ]
    used = {name for node in graph.nodes for name in node.input}  # the body of a loop has copies of constants
    constants = [constant for constant in graph.constants.values() if constant.name in used]
    proto = helper.make_graph(graph.nodes, "attention", graph.inputs, infos, constants)
    opsets = [helper.make_opsetid("", graph.opset)]
    ir_version = helper.find_min_ir_version_for(opsets)  # onnx knows none for the opset of another domain
    if any(node.domain == CONTRIB for node in graph.nodes):
        opsets.append(helper.make_opsetid(CONTRIB, 1))
    model = helper.make_model(proto, opset_imports=opsets, producer_name="sdpa_xp")
    model.ir_version = ir_version
    finished = with_weights(model, graph.weights, graph.function)
    bare = without_numbers(finished)
    onnx.checker.check_model(bare, full_check=True)  # the checker takes at most 2 GiB
    write_metadata(model, {**metadata, "sdpa_xp.math": MATH_MODE}, graph=bare)
    return finished


def _rename(nodes: list[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename values, also where the body of a loop refers to them."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(list(attribute.g.node), names)


def moved_inputs(nodes: Iterable[onnx.NodeProto], inputs: Iterable[str]) -> dict[str, str]:
    """Return the input that each value has its numbers from; computed values have none.

    Reshape(Cast(lengths)) has its numbers from lengths.
    """
    sources = {name: name for name in inputs}
    for node in nodes:
        if node.op_type in _MOVING and node.input[0] in sources:
            sources[node.output[0]] = sources[node.input[0]]
    return sources
