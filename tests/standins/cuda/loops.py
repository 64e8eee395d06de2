"""What a step of a loop moves between host and device on CUDA, as far as a graph alone says it.

The rules are those of onnxruntime's partitioner (`GetCpuPreferredNodes`): on the host stands what follows from
a Shape in the same graph, from its inputs and from constants, unless a kernel of CUDA takes it from the host.
Whatever crosses over elsewhere is copied in each step. `make cuda-placement` asks the partitioner itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import onnx

Kind: TypeAlias = Literal["constant", "known", "host", "counter", "data"]
"""A value that is "known" stands on the host, or is folded to a constant. A "counter" is an input of a body."""

FROM_HOST: Mapping[str, range] = {
    "ConstantOfShape": range(1),
    "Expand": range(1, 2),
    "Loop": range(2),
    "Pad": range(1, 2),
    "Range": range(3),
    "ReduceMax": range(1, 2),
    "ReduceMin": range(1, 2),
    "ReduceSum": range(1, 2),
    "Reshape": range(1, 2),
    "Slice": range(1, 5),
    "Squeeze": range(1, 2),
    "Unsqueeze": range(1, 2),
}
"""The inputs that the kernels of CUDA take from the host."""


def copies_in_loops(graph: onnx.GraphProto) -> list[str]:
    """Return what the bodies of the loops in a graph copy in each step, and loops that run on the host."""
    kinds = _Kinds(graph, {})
    copies = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                copies += _Kinds(attribute.g, kinds.kinds).copies
                states = node.input[2:]
                if not node.input[0] and not states:
                    copies.append(f"{node.name} has no input that keeps it on the device")
                if node.input[0] and all(kinds.kinds[name] != "data" for name in states):
                    copies.append(f"{node.name} runs on the host")
    return copies


class _Kinds:
    """Where each value of a graph stands, and the copies that follow."""

    def __init__(self, graph: onnx.GraphProto, outer: Mapping[str, Kind]) -> None:
        self.kinds: dict[str, Kind] = {constant.name: "constant" for constant in graph.initializer}
        self.kinds |= {value.name: "counter" if outer else "data" for value in graph.input}
        self.outer = outer
        self.states = {value.name for value in graph.input} if outer else set()
        self.copies: list[str] = []
        for node in graph.node:
            kind = self._kind(node)
            self.kinds |= dict.fromkeys(node.output, kind)
            if kind == "data":
                self.copies += self._copies(node)
        # What a loop decides by is read on the host.
        if outer and self.kinds[graph.output[0].name] == "data":
            self.copies.append(f"{graph.output[0].name} is read by the host")

    def _kind(self, node: onnx.NodeProto) -> Kind:
        if node.op_type in ("Shape", "Size"):
            return "host" if node.input[0] in self.states else "known"
        kinds = [self.kinds.get(name, "data") for name in node.input if name]
        if "data" in kinds or not kinds or any(self._taken_from_host(node)):
            return "data"
        if "host" in kinds:
            return "host"
        if "counter" in kinds:  # with constants alone, onnxruntime leaves it on the device
            return "data"
        return "known" if "known" in kinds else "constant"

    def _taken_from_host(self, node: onnx.NodeProto) -> Iterator[bool]:
        for index in FROM_HOST.get(node.op_type, ()):
            if index < len(node.input):
                yield self.kinds.get(node.input[index]) in ("host", "known")

    def _copies(self, node: onnx.NodeProto) -> Iterator[str]:
        for index, name in enumerate(node.input):
            kind = self.kinds.get(name) or self.outer.get(name)
            if kind is None or kind == "constant" or (kind == "counter" and node.op_type == "Identity"):
                continue
            from_host = index in FROM_HOST.get(node.op_type, ())
            if from_host and kind in ("data", "counter"):
                yield f"{node.name} reads {name} on the host"
            if not from_host and kind in ("host", "known") and "Loop" not in node.op_type:
                yield f"{node.name} moves {name} to the device"
            if not from_host and kind == "counter":
                yield f"{node.name} moves {name} to the device"
