"""A graph while it is being written: nodes in order, each value with its dtype and shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from sdpa_xp.checks import message
from sdpa_xp_export._dtypes.promotion import DTYPES
from sdpa_xp_export._graph.value import Value
from sdpa_xp_export._model.external_data import with_weights
from sdpa_xp_export._model.large_model import Model
from sdpa_xp_export._model.weights import Weight
from sdpa_xp_export.spec import Shape, TensorSpec

CONTRIB = "com.microsoft"


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype of that name, bfloat16 too."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


ONNX_DTYPE = {name: helper.np_dtype_to_tensor_dtype(numpy_dtype(name)) for name in DTYPES}


@dataclass(slots=True)
class Graph:
    """Nodes, constants and inputs; `add` names what it adds after the operator and a count."""

    opset: int
    real: str = "float32"
    """The dtype of what is computed of integers: that which scores are held in."""
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[tuple[str, tuple[int, ...], bytes], onnx.TensorProto] = field(default_factory=dict)
    named: dict[str, Value] = field(default_factory=dict)
    """Inputs and initializers that the call names."""
    weights: list[Weight] = field(default_factory=list)
    count: Iterator[int] = field(default_factory=itertools.count)
    function: str = "export_attention"
    """What messages name."""

    @property
    def mixes_kinds(self) -> bool:
        """Whether dtypes of several kinds may be computed with each other, as in functions of the indices."""
        return True

    @property
    def computes_bfloat16(self) -> bool:
        """Whether the provider has kernels for bfloat16; the CPU has none that compute."""
        return False

    @property
    def erf_keeps_nan(self) -> bool:
        """Whether every release that the graph is for gives NaN for the Erf of NaN."""
        return False

    def body(self) -> Graph:
        """The graph of a Loop within this one: it sees all that this one holds, and adds constants to it."""
        return Graph(
            self.opset,
            self.real,
            constants=self.constants,
            named=self.named,
            weights=self.weights,
            count=self.count,
            function=self.function,
        )

    def input(self, name: str, dtype: str, shape: Shape) -> Value:
        """A new input of the graph."""
        self.inputs.append(helper.make_tensor_value_info(name, ONNX_DTYPE[dtype], shape))
        return Value(self, name, dtype, shape)

    def argument(self, name: str, spec: TensorSpec) -> Value:
        """The input that the call names `name`."""
        if name not in self.named:
            self.named[name] = self.input(name, spec.dtype, spec.shape)
        return self.here(self.named[name])

    def weight(self, name: str, array: NDArray[Any]) -> Value:
        """The initializer that the call names `name`."""
        if name not in self.named:
            self.weights.append(Weight(name, array))
            self.named[name] = Value(self, name, array.dtype.name, array.shape)
        return self.here(self.named[name])

    def operand(self, given: object) -> Value:
        """A value as it is; an array as `from_array` makes one of it."""
        return given if isinstance(given, Value) else self.from_array(given)

    def from_array(self, array: object) -> Value:
        """What is neither a value nor a number, as a value; a function of the indices has no use for it."""
        rule = "a function of the indices must compute with its arguments and with numbers alone"
        raise TypeError(message(self.function, rule, {"operand": type(array).__name__}))

    def here(self, value: Value) -> Value:
        """A value of an outer graph, whose operators write nodes into this one."""
        return Value(self, value.name, value.dtype, value.shape)

    def constant(self, value: object, dtype: str) -> Value:
        """An initializer; the same numbers are held once."""
        with np.errstate(over="ignore"):  # a number beyond a dtype is an infinity in it
            array = np.asarray(value, dtype=numpy_dtype(dtype))
        key = (dtype, array.shape, array.tobytes())
        if key not in self.constants:
            name = f"constant_{len(self.constants)}"
            self.constants[key] = numpy_helper.from_array(array, name)
        return Value(self, self.constants[key].name, dtype, array.shape)

    def add(self, op: str, *inputs: Value | None, dtype: str, shape: Shape, **attributes: Any) -> Value:
        """A new node with one output of `dtype` and `shape`; None where an input is left out."""
        (value,) = self.add_many(op, *inputs, outputs=[(dtype, shape)], **attributes)
        return value

    def add_many(
        self,
        op: str,
        *inputs: Value | None,
        outputs: list[tuple[str, Shape]],
        domain: str = "",
        **attributes: Any,
    ) -> list[Value]:
        """A new node with an output for each dtype and shape in `outputs`."""
        name = f"{op}_{next(self.count)}"
        names = [name, *(f"{name}_{index}" for index in range(1, len(outputs)))]
        given = ["" if value is None else value.name for value in inputs]
        self.nodes.append(helper.make_node(op, given, names, name=name, domain=domain, **attributes))
        return [Value(self, each, *like) for each, like in zip(names, outputs, strict=True)]

    def is_product(self, value: Value) -> bool:
        """Whether `value` is what a MatMul returned."""
        return any(node.op_type == "MatMul" and value.name in node.output for node in self.nodes)

    @staticmethod
    def onnx_dtype(dtype: str) -> int:
        return ONNX_DTYPE[dtype]

    def subgraph(self, outputs: list[Value]) -> onnx.GraphProto:
        """This graph as the body of a Loop."""
        infos = [helper.make_tensor_value_info(out.name, ONNX_DTYPE[out.dtype], out.shape) for out in outputs]
        return helper.make_graph(self.nodes, "body", self.inputs, infos)

    def model(self, outputs: Mapping[str, Value], metadata: dict[str, str]) -> Model:
        """The finished model, whose outputs get the names that they stand under."""
        names = {}
        for name, value in outputs.items():
            made = value if any(value.name in node.output for node in self.nodes) else _identity(self, value)
            names[made.name] = name
        _rename(self.nodes, names)
        infos = [
            helper.make_tensor_value_info(name, ONNX_DTYPE[value.dtype], value.shape)
            for name, value in outputs.items()
        ]
        graph = helper.make_graph(self.nodes, "attention", self.inputs, infos, [*self.constants.values()])
        opsets = [helper.make_opsetid("", self.opset)]
        ir_version = helper.find_min_ir_version_for(opsets)
        if any(node.domain == CONTRIB for node in self.nodes):
            opsets.append(helper.make_opsetid(CONTRIB, 1))
        model = helper.make_model(graph, opset_imports=opsets, producer_name="sdpa_xp")
        model.ir_version = ir_version
        helper.set_model_props(model, metadata)
        return with_weights(model, self.weights, self.function)


def _identity(graph: Graph, value: Value) -> Value:
    """value -> Identity(value), where an output would else be an input."""
    return graph.add("Identity", value, dtype=value.dtype, shape=value.shape)


def _rename(nodes: list[onnx.NodeProto], names: dict[str, str]) -> None:
    """Values of these names get others, in bodies of loops too."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(list(attribute.g.node), names)
