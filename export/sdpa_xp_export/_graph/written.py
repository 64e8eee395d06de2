"""What is written of a graph, as messages of ONNX: its inputs, nodes, constants and weights, by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from .._files.model import Weight

_COMMUTING = ("Add", "Mul", "Equal", "And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
_MIRRORED = {"Greater": "Less", "GreaterOrEqual": "LessOrEqual"}
_MOVING = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Expand")
"""Operators that change no integer but its dtype."""


@dataclass(slots=True)
class Written:
    """A call of attention writes into the graph that it stands in; the body of a loop has its own."""

    count: Iterator[int] = field(default_factory=itertools.count)
    """Counts nodes, also those of bodies, so that no name stands in two graphs."""
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    outputs: dict[bytes, list[str]] = field(default_factory=dict)
    """The outputs of each node, by what it computes."""
    declared: list[onnx.ValueInfoProto] = field(default_factory=list)
    """Shapes of values that no operator says."""
    constants: dict[tuple[str, tuple[int, ...], bytes], onnx.TensorProto] = field(default_factory=dict)
    weights: list[Weight] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The names of all values and constants, but not of inputs and weights."""
        edges = {name for node in self.nodes for name in node.output}
        return edges | {constant.name for constant in self.constants.values()}

    def node(self, op: str, inputs: list[str], outputs: int, attributes: dict[str, Any]) -> list[str]:
        """Add a node with that many outputs, unless a node computes them, and return their names.

        A tool may take two nodes that compute the same for one, and leave an invalid graph; and selections by
        equal masks have one length.
        """
        order = sorted(inputs) if op in _COMMUTING else inputs[:: -1 if op in _MIRRORED else 1]
        alike = helper.make_node(_MIRRORED.get(op, op), order, [""] * outputs, **attributes)
        key = alike.SerializeToString()
        if op == "Identity" or key not in self.outputs:  # a copy is there to be another value
            name = f"{op}_{next(self.count)}"
            self.outputs[key] = [name, *(f"{name}_{index}" for index in range(1, outputs))]
            self.nodes.append(helper.make_node(op, inputs, self.outputs[key], name=name, **attributes))
        return self.outputs[key]

    def constant(self, dtype: str, array: NDArray[Any], *, in_body: bool) -> str:
        """Return the name of an initializer; equal numbers share one."""
        key = (dtype, array.shape, array.tobytes())  # bytes tell -0.0 from 0.0, and one NaN from another
        if key not in self.constants:
            name = f"Constant_{next(self.count)}" if in_body else f"constant_{len(self.constants)}"
            self.constants[key] = numpy_helper.from_array(array, name)
        return self.constants[key].name

    def numbers(self, name: str) -> NDArray[Any] | None:
        """Return the numbers of a constant or a weight; None for other values."""
        arrays = [numpy_helper.to_array(x) for x in self.constants.values() if x.name == name]
        arrays += [weight.array for weight in self.weights if weight.name == name]
        return arrays[0] if arrays else None

    def used_constants(self) -> list[onnx.TensorProto]:
        """Return the constants that a node takes; the body of a loop has copies of those that it takes."""
        used = {name for node in self.nodes for name in node.input}
        return [constant for constant in self.constants.values() if constant.name in used]

    def prune(self, outputs: Iterable[str]) -> None:
        """Remove everything that no output depends on, except inputs."""
        needed = {*outputs}
        kept = []
        for node in reversed(self.nodes):  # nodes are in the order in which they are computed
            if needed.intersection(node.output):
                needed.update(node.input, _captured_names(node))
                kept.append(node)
        self.nodes[:] = reversed(kept)
        self.weights[:] = [weight for weight in self.weights if weight.name in needed]
        self.constants = {key: constant for key, constant in self.constants.items() if constant.name in needed}


def _captured_names(node: onnx.NodeProto) -> set[str]:
    """Return the names that the bodies of a loop read, also those from the graph around them."""
    bodies = [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
    inner = {name for body in bodies for node in body.node for name in (*node.input, *_captured_names(node))}
    return inner | {output.name for body in bodies for output in body.output}


def moved_inputs(nodes: Iterable[onnx.NodeProto], inputs: Iterable[str]) -> dict[str, str]:
    """Return the input that each value has its numbers from; computed values have none.

    Reshape(Cast(lengths)) has its numbers from lengths.
    """
    sources = {name: name for name in inputs}
    for node in nodes:
        if node.op_type in _MOVING and node.input[0] in sources:
            sources[node.output[0]] = sources[node.input[0]]
    return sources
