"""A graph while it is being written: nodes in order, each value with its dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sdpa_xp_export.spec import Shape, TensorSpec

ONNX_DTYPE = {
    "float16": onnx.TensorProto.FLOAT16,
    "float32": onnx.TensorProto.FLOAT,
    "float64": onnx.TensorProto.DOUBLE,
    "bool": onnx.TensorProto.BOOL,
    "int64": onnx.TensorProto.INT64,
}


@dataclass(frozen=True, slots=True)
class Value:
    """An edge of the graph."""

    name: str
    dtype: str
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(slots=True)
class Graph:
    """Nodes, constants and inputs; `add` names what it adds after the operator and a count."""

    opset: int
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[tuple[str, tuple[int, ...], bytes], onnx.TensorProto] = field(default_factory=dict)

    def input(self, name: str, spec: TensorSpec) -> Value:
        """A new input of the graph."""
        self.inputs.append(helper.make_tensor_value_info(name, ONNX_DTYPE[spec.dtype], spec.shape))
        return Value(name, spec.dtype, spec.shape)

    def constant(self, value: object, dtype: str) -> Value:
        """An initializer; the same numbers are held once."""
        array = np.asarray(value, dtype=dtype)
        key = (dtype, array.shape, array.tobytes())
        if key not in self.constants:
            name = f"constant_{len(self.constants)}"
            self.constants[key] = numpy_helper.from_array(array, name)
        return Value(self.constants[key].name, dtype, array.shape)

    def add(self, op: str, *inputs: Value, dtype: str, shape: Shape, **attributes: Any) -> Value:
        """A new node with one output of `dtype` and `shape`."""
        name = f"{op}_{len(self.nodes)}"
        names = [value.name for value in inputs]
        self.nodes.append(helper.make_node(op, names, [name], name=name, **attributes))
        return Value(name, dtype, shape)

    def model(self, output: Value, name: str, metadata: dict[str, str]) -> onnx.ModelProto:
        """The finished model, whose one output `output` gets the name `name`."""
        self.nodes[-1].output[0] = name
        outputs = [helper.make_tensor_value_info(name, ONNX_DTYPE[output.dtype], output.shape)]
        constants = list(self.constants.values())
        graph = helper.make_graph(self.nodes, "attention", self.inputs, outputs, constants)
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="sdpa_xp")
        model.ir_version = helper.find_min_ir_version_for(opsets)
        helper.set_model_props(model, metadata)
        return model
