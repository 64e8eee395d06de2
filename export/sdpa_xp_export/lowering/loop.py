"""A Loop whose body uses values of the graph around it, written so that tools find everything that it needs.

Tools that cut, join or rename graphs (`onnx.utils.extract_model`, `onnx.compose`) follow the inputs of nodes,
and do not look for what a body captures. Keys and values as states of the loop would show them, but onnxruntime
copies the states of a Scan in each step (1.13 to 1.28 of the time at L = 4096), and those of a Loop at its end
(1.2 of the memory). So the loop carries the sum of the lengths of what its body captures.

On a GPU no integer moves between host and device in a step, because each move is a wait. onnxruntime leaves on
the host what follows from a Shape in the same graph, from its constants and from its inputs
(`GetCpuPreferredNodes` of fallback_cpu_capability.cc), and it moves a loop to the host if all its inputs are
there. So the number of a step is multiplied with a length of 1 that only a run knows, and the loop has no count
of its steps: each says whether another one follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from sdpa_xp_export._arrays import namespace as xp
from sdpa_xp_export._arrays import ops
from sdpa_xp_export._graph.graph import Graph, GraphValue
from sdpa_xp_export.lowering.graph_lengths import GraphLengths


def loop_over_steps(
    graph: Graph, step: Callable[[Graph, GraphValue], tuple[GraphValue, Sequence[GraphValue]]]
) -> list[GraphValue]:
    """Write a Loop over the steps 0, 1, ..., and return what they give, stacked in this order.

    Args:
        graph: The graph around the loop.
        step: Writes a step into the body of the loop: the body and the number of the step, (1,) -> whether
            another one follows, (1,), which must follow from the number alone; and the results.
    """
    body = graph.loop_body()
    number = body.input("Iteration", "int64", ())
    body.input("GoesOn", "bool", ())
    carried = body.input("Captured", "int64", ("one",))
    one = ops.shape_of(carried)
    goes_on, results = step(body, number * one)
    states = [ops.scalar(goes_on), body.copy(carried)]  # an output of a body must be the output of a node
    stacked = [(result.elem_type, ("steps", *result.dims)) for result in results]
    captured = _sum_of_captured(body)
    outputs = graph.add_many(
        "Loop",
        None,
        graph.constant(value=True, dtype="bool"),
        captured,
        outputs=[("int64", captured.dims), *stacked],
        body=body.subgraph([*states, *results]),
    )
    return outputs[1:]


def _sum_of_captured(body: Graph) -> GraphValue:
    """What a body captures -> an integer that follows from each of it, (1,)."""
    used = {name for node in body.nodes for name in node.input}
    parts = [
        value if (value.elem_type, value.dims) == ("int64", (1,)) else ops.shape_of(value)
        for value in body.captured.values()
        if value.name in used
    ]
    return ops.reduce("ReduceSum", xp.concat(parts))


class LengthsInBody(GraphLengths):
    """The lengths of a call in the body of a loop, read there: a GPU's provider keeps them on the host."""

    def __init__(self, graph: Graph, outer: GraphLengths, key: GraphValue) -> None:
        super().__init__(graph, outer.call)
        self.outer = outer
        self.key = key

    @cached_property
    def key_count(self) -> GraphValue:
        return ops.length_of(self.graph.here(self.key), self.key.ndim - 2)

    @cached_property
    def kept_keys(self) -> GraphValue:
        return ops.scalar(self.key_count)

    def extreme(self, op: str, integers: GraphValue, *, shifts: bool = False) -> GraphValue:
        """integers of the outer graph -> the length of an array that is as long as the extreme says, (1,).

        Only a Shape gives a body an integer that follows from data without a wait in each step. A length is not
        negative, so L is added in between; what is cut off at -L and S bounds no key. A query of a cache may
        stand at -L to S before it is shifted, so there both are L + S.
        """
        lengths = self.outer
        queries, keys = (lengths.length(name) for name in (self.call.sizes.queries, self.call.sizes.keys))
        added = self.length(self.call.sizes.queries)
        if shifts and self.call.cached:
            queries = keys = queries + keys
            added = added + self.length(self.call.sizes.keys)
        extreme = xp.clip(lengths.extreme(op, integers), -queries, keys, exact=False)
        marks = xp.arange(0, ops.scalar(extreme + queries), length="marks")
        return ops.length_of(self.graph.here(marks), 0) - added


class LengthsAsData(GraphLengths):
    """The lengths of a call for arithmetic with indices, which a GPU computes: moved there before a loop."""

    def __init__(self, host: GraphLengths) -> None:
        super().__init__(host.graph, host.call)
        self.host = host
        self._numbers: dict[int | str, GraphValue] = {}

    def length(self, name: int | str) -> GraphValue:
        return self.host.length(name)

    def number(self, name: int | str) -> GraphValue:
        if name not in self._numbers:
            number = self.host.number(name)
            self._numbers[name] = number if isinstance(name, int) else _as_data(number)
        return self._numbers[name]

    @cached_property
    def kept_keys(self) -> GraphValue:
        return self.host.kept_keys

    @cached_property
    def position(self) -> GraphValue | int:
        if self.filled is not None:
            return self.filled - self.queries
        position = self.host.position
        return position if isinstance(position, int) else _as_data(position)

    def _new_keys(self) -> GraphValue:
        return self.number(self.call.key.shape[self.call.length_axis])


def _as_data(length: GraphValue) -> GraphValue:
    """A length -> the same number: a Range of one, which takes its bounds from the host, and gives data."""
    return ops.scalar(xp.arange(length, length + 1, length=1))
