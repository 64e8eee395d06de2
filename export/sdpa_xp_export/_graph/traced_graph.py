"""The graph of a layer while it is traced: arrays that meet its values become initializers."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

import array_api_compat
import onnx

from sdpa_xp.errors import ArgumentTypeError
from sdpa_xp_export._dtypes.dtype import to_numpy
from sdpa_xp_export._graph.graph import Attend, Graph, GraphValue
from sdpa_xp_export._graph.lengths import Length, plain
from sdpa_xp_export.spec import SymbolicShape, addends

_MOVING = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Expand")
"""Operators that change no integer but its dtype."""
_NODE_NAME = re.compile(r"(constant|[A-Z]\w*)_\d+")


@dataclass(slots=True, kw_only=True)
class TracedGraph(Graph):
    """A graph that knows where to read each named length, and the initializer of each array of the caller."""

    function: str = "to_onnx"
    mixes_kinds: bool = False
    array_names: dict[int, str] = field(default_factory=dict)
    """The name that the initializer of an array gets, by the identity of the array."""
    initializers: dict[int, tuple[Any, GraphValue]] = field(default_factory=dict)
    """Each array that met a value, which keeps it alive, and its initializer, by identity."""
    length_sources: dict[str, tuple[GraphValue, int]] = field(default_factory=dict)
    """A value that has a length, and the axis, by the name of the length."""
    computed_lengths: dict[str, tuple[str, tuple[int | str, ...]]] = field(default_factory=dict)
    """The operation and the operands of a length that is computed from others, by its name."""
    concatenated: dict[str, tuple[int, GraphValue, GraphValue]] = field(default_factory=dict)
    """The axis and the two parts of a value that joins two others, by its name. A cache is such a value."""
    equal_values: dict[str, GraphValue] = field(default_factory=dict)
    """Another value with the same numbers, which an attention node returns anyway, by the name of a value."""

    def input(self, name: str, dtype: str, shape: SymbolicShape) -> GraphValue:
        """Add an input; its named lengths are read from it."""
        value = Graph.input(self, name, dtype, shape)
        self.named[name] = value
        for axis, length in enumerate(shape):
            if isinstance(length, str):
                self.length_sources.setdefault(length, (value, axis))
        return value

    @property
    def used_names(self) -> set[str]:
        """The names of all values, inputs and constants."""
        edges = {name for node in self.nodes for name in node.output}
        return edges | self.named.keys() | {constant.name for constant in self.constants.values()}

    def free_name(self, name: str) -> str:
        """Return `name`, with a number if it is taken, and never a name that a node or a constant may get."""
        used, name = self.used_names, f"{name}_" if _NODE_NAME.fullmatch(name) else name
        candidates = (f"{name}_{n}" if n else name for n in itertools.count())
        return next(candidate for candidate in candidates if candidate not in used)

    def length(self, name: int | str) -> GraphValue:
        """Return the length of that name, (1,)."""
        if isinstance(name, int) or name.isdecimal():
            return self.constant([int(name)], "int64")
        if name in self.length_sources:
            value, axis = self.length_sources[name]
            return self.add("Shape", value, dtype="int64", shape=(1,), start=axis, end=axis + 1)
        if name in self.computed_lengths:
            operation, operands = self.computed_lengths[name]
            return cast(GraphValue, getattr(self.namespace, operation)(*map(self.length, operands)))
        return reduce(operator.add, map(self.length, addends(name)))

    def computed_length(self, name: str, operation: str, *operands: int | str) -> str:
        """Let the length of that name be computed from others, unless a value has it."""
        self.computed_lengths[name] = operation, operands
        return name

    def from_array(self, array: object) -> GraphValue:
        """Convert an array of any library to an initializer, one for each array, and a length to a number."""
        if isinstance(array, Length):
            axes = self.constant([0], "int64")
            return self.add("Squeeze", self.length(plain(array)), axes, dtype="int64", shape=())
        if not array_api_compat.is_array_api_obj(array):
            rule = "values of a graph must be computed with arrays and numbers"
            raise ArgumentTypeError(self.function, rule, {"operand": type(array).__name__})
        # By identity, as arrays have no hash. The entry keeps the array alive, so no other one gets its number.
        if id(array) not in self.initializers:
            name = self.free_name(self.array_names.get(id(array)) or f"weight_{len(self.weights)}")
            initializer = self.weight(name, to_numpy(self.function, name, array))
            self.initializers[id(array)] = array, initializer
        return self.initializers[id(array)][1]

    def array_of(self, value: object) -> object:
        """Return the array that an initializer was converted from, None for other values, else `value`."""
        if not isinstance(value, GraphValue):
            return value
        return next((array for array, known in self.initializers.values() if known.name == value.name), None)

    def call_graph(self, named: dict[str, GraphValue], float_dtype: str, attend: Attend) -> Graph:
        """Return this graph as the graph of one call of attention, whose inputs are values of this graph."""
        lists = ("inputs", "nodes", "constants", "weights")  # the call writes its nodes here
        shared = {name: getattr(self, name) for name in lists}
        return self.part(attend=attend, float_dtype=float_dtype, named=named, **shared)

    def prune(self, outputs: list[GraphValue]) -> None:
        """Remove everything that no output depends on, except inputs."""
        needed = {value.name for value in outputs}
        kept = []
        for node in reversed(self.nodes):  # nodes are in the order in which they are computed
            if needed.intersection(node.output):
                needed.update(node.input, _captured_names(node))
                kept.append(node)
        self.nodes[:] = reversed(kept)
        self.weights[:] = [weight for weight in self.weights if weight.name in needed]
        self.constants = {key: constant for key, constant in self.constants.items() if constant.name in needed}


def name_length(value: GraphValue, axis: int, name: int | str) -> GraphValue:
    """Let a name of a length be read from `value`, if its graph reads lengths; return `value`."""
    if isinstance(name, str) and isinstance(value.graph, TracedGraph):
        # The first value stays: its Shape needs no node before it if it is an input.
        value.graph.length_sources.setdefault(name, (value, axis))
    return value


def traced_graph_of(value: GraphValue) -> TracedGraph:
    """Return the graph of `value`, which can read named lengths; the graph of an index function cannot."""
    if not isinstance(value.graph, TracedGraph):
        rule = "a function of the indices must use no length that is known only when the graph runs"
        raise ArgumentTypeError(value.graph.function, rule, {"shape": value.dims})
    return value.graph


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
