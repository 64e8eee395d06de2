"""The graph of a function while it is traced: arrays that meet its values become initializers."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

import array_api_compat
import onnx

from sdpa_xp.checks import message
from sdpa_xp_export._call.operands import numbers_of
from sdpa_xp_export._graph.graph import Graph
from sdpa_xp_export._graph.lengths import Length
from sdpa_xp_export._graph.value import Value
from sdpa_xp_export._runtime.releases import ERF_KEEPS_NAN, Runtime
from sdpa_xp_export.spec import Shape, addends

_OF_NODES = re.compile(r"(constant|[A-Z]\w*)_\d+")


@dataclass(slots=True, kw_only=True)
class Trace(Graph):
    """Nodes, and where each length and each array of the caller is among them."""

    function: str = "to_onnx"
    target: Runtime
    form: str = "auto"
    names: dict[int, str] = field(default_factory=dict)
    """By the identity of an array, what its initializer is to be called."""
    arrays: dict[int, tuple[Any, Value]] = field(default_factory=dict)
    """By identity, each array that met a value, which is kept alive, and its initializer."""
    lengths: dict[str, tuple[Value, int]] = field(default_factory=dict)
    """A value and the axis of it that has the length of that name."""
    joined: dict[str, tuple[int, Value, Value]] = field(default_factory=dict)
    """By the name of a value that is two others joined: along which axis, and these. So is a cache."""
    same: dict[str, Value] = field(default_factory=dict)
    """By the name of a value, another with the same numbers, which an attention returns anyway."""
    chosen: list[tuple[str, str]] = field(default_factory=list)
    """The form of each attention, and why it is that one."""

    @property
    def mixes_kinds(self) -> bool:
        return False

    @property
    def computes_bfloat16(self) -> bool:
        return self.target.provider == "cuda"

    @property
    def erf_keeps_nan(self) -> bool:
        return self.target.release >= ERF_KEEPS_NAN

    def input(self, name: str, dtype: str, shape: Shape) -> Value:
        """A new input of the graph, whose lengths are those that others are known by."""
        made = Graph.input(self, name, dtype, shape)
        self.named[name] = made
        for axis, length in enumerate(shape):
            if isinstance(length, str):
                self.lengths.setdefault(length, (made, axis))
        return made

    @property
    def used(self) -> set[str]:
        """The names of what is in the graph."""
        edges = {name for node in self.nodes for name in node.output}
        return edges | self.named.keys() | {each.name for each in self.constants.values()}

    def free(self, name: str) -> str:
        """`name`, with a number behind it where it is taken; none that a node or a constant may have."""
        used, name = self.used, f"{name}_" if _OF_NODES.fullmatch(name) else name
        names = (f"{name}_{n}" if n else name for n in itertools.count())
        return next(each for each in names if each not in used)

    def having(self, value: Value, axis: int, name: str) -> Value:
        """`value`, whose length along `axis` is new and of that name."""
        self.lengths.setdefault(name, (value, axis))
        return value

    def length(self, name: int | str) -> Value:
        """The length of that name, (1,)."""
        if isinstance(name, int) or name.isdecimal():
            return self.constant([int(name)], "int64")
        if name in self.lengths:
            value, axis = self.lengths[name]
            return self.add("Shape", value, dtype="int64", shape=(1,), start=axis, end=axis + 1)
        one, *others = (self.length(part) for part in addends(name))
        for other in others:
            one = one + other
        return one

    def from_array(self, array: object) -> Value:
        """An array of any library -> an initializer, once each; a length -> a number."""
        if isinstance(array, Length):
            axes = self.constant([0], "int64")
            return self.add("Squeeze", self.length(array), axes, dtype="int64", shape=())
        if not array_api_compat.is_array_api_obj(array):
            rule = "values of a graph must be computed with arrays and numbers"
            raise TypeError(message(self.function, rule, {"operand": type(array).__name__}))
        if id(array) not in self.arrays:
            name = self.free(self.names.get(id(array)) or f"weight_{len(self.weights)}")
            made = self.weight(name, numbers_of(self.function, name, array))
            self.arrays[id(array)] = array, made
        return self.arrays[id(array)][1]

    def part(self, named: dict[str, Value], real: str) -> Graph:
        """This graph as that of one call of attention, whose inputs are values of this one."""
        return Graph(
            self.opset,
            real,
            self.inputs,
            self.nodes,
            self.constants,
            named,
            self.weights,
            self.count,
            self.function,
        )

    def prune(self, outputs: list[Value]) -> None:
        """Leave out what no output follows from, but for the inputs."""
        needed = {value.name for value in outputs}
        kept = []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(node.input, _captured(node))
                kept.append(node)
        self.nodes[:] = reversed(kept)
        self.weights[:] = [weight for weight in self.weights if weight.name in needed]
        self.constants = {key: each for key, each in self.constants.items() if each.name in needed}


def trace_of(value: Value) -> Trace:
    """The graph of `value`, which knows the lengths that have names; that of indices does not."""
    if not isinstance(value.graph, Trace):
        rule = "a function of the indices must use no length that is known only when the graph runs"
        raise TypeError(message(value.graph.function, rule, {"shape": value.shape}))
    return value.graph


def _captured(node: onnx.NodeProto) -> set[str]:
    """What the bodies of a node read, of the graph around them too."""
    bodies = [each.g for each in node.attribute if each.type == onnx.AttributeProto.GRAPH]
    return {name for body in bodies for inner in body.node for name in (*inner.input, *_captured(inner))} | {
        output.name for body in bodies for output in body.output
    }
