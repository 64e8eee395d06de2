"""Models that state an honest call, and also ask for more time or memory than there is."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import onnx
from internals import digest
from onnx import TensorProto, helper, numpy_helper

from sdpa_xp_export import TensorSpec, export_attention


def honest(dtype: str = "float32", form: str = "primitive") -> onnx.ModelProto:
    qkv = TensorSpec(dtype, ("B", 2, "L", 8))
    return export_attention(qkv, qkv, qkv, form=form)


def restated(model: onnx.ModelProto, **stated: object) -> onnx.ModelProto:
    """Change what the metadata state, with a digest that fits."""
    entries = {entry.key.rpartition(".")[0]: entry for entry in model.metadata_props}
    call = entries["sdpa_xp.call"]
    call.value = json.dumps(json.loads(call.value) | stated)
    entries["sdpa_xp.digest"].value = digest(call.value, {})
    return model


def many_heads(heads: int) -> onnx.ModelProto:
    """A small file whose reference has so many rows for each query."""
    model = honest()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_value = heads
    return restated(model, **dict.fromkeys(("query", "key", "value"), f"float32[B,{heads},L,8]"))


def many_windows(count: int) -> onnx.ModelProto:
    """A small file whose call has so many masks to compute."""
    return restated(honest(), attn_mask=" & ".join(f"sliding_window({400 + left}, 0)" for left in range(count)))


def endless_loop(rounds: int = 2**62) -> onnx.ModelProto:
    model = honest()
    ports = [("round", TensorProto.INT64, []), ("on", TensorProto.BOOL, []), ("x", TensorProto.FLOAT, [1])]
    ends = [("still_on", TensorProto.BOOL, []), ("twice", TensorProto.FLOAT, [1])]
    nodes = [helper.make_node("Identity", ["on"], ["still_on"]), helper.make_node("Add", ["x", "x"], ["twice"])]
    values = [[helper.make_tensor_value_info(*port) for port in side] for side in (ports, ends)]
    body = helper.make_graph(nodes, "body", *values)
    with_constant(model, "rounds", np.int64(rounds))
    with_constant(model, "zero", np.zeros(1, np.float32))
    model.graph.node.append(helper.make_node("Loop", ["rounds", "", "zero"], ["hostile"], body=body))
    return used(model)


def doubling_functions(count: int = 30, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """Each function calls the one before twice."""
    model = model or honest()
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    for number in range(count):
        before = f"f{number - 1}"
        nodes = [
            helper.make_node(before, ["a"], ["t"], domain="own"),
            helper.make_node(before, ["t"], ["b"], domain="own"),
        ]
        nodes = nodes if number else [helper.make_node("Add", ["a", "a"], ["b"])]
        model.functions.append(helper.make_function("own", f"f{number}", ["a"], ["b"], nodes, opsets))
    model.opset_import.append(opsets[1])
    with_constant(model, "zero", np.zeros(1, np.float32))
    model.graph.node.append(helper.make_node(f"f{count - 1}", ["zero"], ["hostile"], domain="own"))
    return used(model)


def large(op: str, inputs: Sequence[np.ndarray | str], **attributes: object) -> onnx.ModelProto:
    """One node with a large output; "sum" is a number that follows from the query, so nothing is folded."""
    model = honest()
    model.graph.node.append(helper.make_node("ReduceSum", ["query"], ["sum"], keepdims=0))
    names = []
    for number, value in enumerate(inputs):
        names.append(value if isinstance(value, str) else f"constant_of_hostile_{number}")
        if not isinstance(value, str):
            with_constant(model, names[-1], value)
    model.graph.node.append(helper.make_node(op, names, ["hostile"], **attributes))
    return used(model)


def large_output(shape: Sequence[int]) -> onnx.ModelProto:
    """The output itself has that shape, which follows from the query as far as onnxruntime knows."""
    model = honest()
    for node in model.graph.node:
        node.output[:] = ["honest" if name == "output" else name for name in node.output]
    with_constant(model, "wanted", np.asarray(shape, np.int64))
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["query"], ["shape"]),
            helper.make_node("Sub", ["shape", "shape"], ["zeros"]),
            helper.make_node("Add", ["wanted", "zeros"], ["hostile_shape"]),
            helper.make_node("ReduceSum", ["query"], ["sum"], keepdims=0),
            helper.make_node("Expand", ["sum", "hostile_shape"], ["output"]),
        ]
    )
    return model


def with_constant(model: onnx.ModelProto, name: str, value: np.ndarray | np.generic) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))


def used(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add the sum of the value `hostile` to the output, so that it is computed."""
    for node in model.graph.node:
        node.output[:] = ["honest" if name == "output" else name for name in node.output]
    dtype = model.graph.output[0].type.tensor_type.elem_type
    model.graph.node.extend(
        [
            helper.make_node("Cast", ["hostile"], ["hostile_cast"], to=dtype),
            helper.make_node("ReduceSum", ["hostile_cast"], ["hostile_sum"], keepdims=0),
            helper.make_node("Add", ["honest", "hostile_sum"], ["output"]),
        ]
    )
    return model
